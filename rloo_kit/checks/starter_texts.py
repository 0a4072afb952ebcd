"""The files of a first run: config with a comment for each key that matters, reward function, and its test."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from rloo_kit.checks.starter_table import Table
from rloo_kit.config.batches import GENERATIONS
from rloo_kit.config.derived import thinks_if_asked
from rloo_kit.config.embedded import EMBEDDED_PREFIX, SMOLLM2
from rloo_kit.config.schema import LORA_LEARNING_RATE
from rloo_kit.plan.result import VramPlan
from rloo_kit.think_tags import THINK_END

# A small model needs a higher rate: those of the shipped configs of the built-in models.
EMBEDDED_LEARNING_RATE, SMOLLM2_LEARNING_RATE = 2e-3, 5e-4


@dataclass(frozen=True)
class Settings:
    """Values for the three files; lengths in tokens.

    Attributes:
        file: the config. module: the reward's module. table: the data. thinks: whether the model thinks, by its name.
        prompts: prompts per step. eval_batch: completions generated at once in the evaluation.
    """

    file: Path
    module: str
    model: str
    thinks: bool
    on_cuda: bool
    table: Table
    prompt_length: int
    completion_length: int
    thinking_budget: int | None
    memory: str
    prompts: int
    test_size: int
    eval_batch: int

    @property
    def is_embedded(self) -> bool:
        return self.model.startswith(EMBEDDED_PREFIX)

    @property
    def is_built_in(self) -> bool:
        return self.is_embedded or self.model in SMOLLM2

    @property
    def form(self) -> str:
        """Where `answer_reward` finds the answer; a small language model writes numbers in sentences, and no boxes."""
        if self.is_built_in:
            return "last_number" if self.model in SMOLLM2 and self.table.are_numbers else "whole"
        return "boxed"


def _written(rate: float) -> str:
    """A rate in the usual notation.

    >>> _written(2e-3)
    '2e-3'
    """
    return f"{rate:.0e}".replace("e-0", "e-")


def _quoted(value: Any) -> str:
    """A value in the syntax that YAML and Python share: text in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def make_header(settings: Settings, plan: VramPlan) -> str:
    """The comment at the top: how to run it, the size of a step, and the memory by the plan."""
    completions, length = settings.prompts * GENERATIONS, settings.completion_length
    test = settings.file.with_name(f"test_{settings.module}.py")
    step = f"{settings.prompts} prompts x {GENERATIONS} generations = {completions} completions"
    return f"""\
# {settings.model}
# on {settings.table.source}; written by rloo-kit init
#
# Check:   rloo-kit preflight {settings.file}
# Run:     rloo-kit train {settings.file}
# Keys:    rloo-kit config {settings.file} prints every key, defaults included
# Reward:  {settings.module}.py, yours to edit
# Test:    pytest {test}
# Step:    {step} of at most {length} tokens,
#          {plan.rows} generated at once
# Memory:  {plan.rollout_gib:.1f} GiB in a rollout, {plan.training_gib:.1f} GiB in training, of \
{plan.machine.usable_gib:.1f} GiB
#          on {plan.machine.name} (computed, not measured)

"""


def make_body(settings: Settings) -> str:
    """The keys of the run's file."""
    sections = (_model, _data, _rewards, _rloo, _eval)
    return "\n".join("\n".join(section(settings)) + "\n" for section in sections)


def _model(settings: Settings) -> Iterator[str]:
    whole = settings.prompt_length + settings.completion_length
    yield "model:"
    yield f"  name: {_quoted(settings.model)}"
    if thinks_if_asked(settings.model):
        yield "  enable_thinking: false  # true trains it with thinking"
    yield f"  max_seq_length: {whole}  # tokens, prompt and completion together"
    if settings.on_cuda and not settings.is_embedded:
        yield "  load_in_4bit: true  # false is faster if it fits; check with rloo-kit plan"
        yield "  gradient_checkpointing: unsloth"
    elif not settings.is_built_in:
        yield "  gradient_checkpointing: true"
    yield "  lora: {r: 16, alpha: 16}  # null: full fine-tuning, at a tenth of the rate"


def _data(settings: Settings) -> Iterator[str]:
    table = settings.table
    yield "data:"
    yield f"  source: {_quoted(table.source)}"
    yield f"  prompt_column: {_quoted(table.prompt_column)}"
    yield f"  answer_column: {_quoted(table.answer_column)}"
    if table.answer_after is not None:
        yield f"  answer_after: {_quoted(table.answer_after)}  # the gold answer follows this marker"
    if settings.form == "boxed" and table.are_texts:
        what = "Give the final answer, a number," if table.are_numbers else "Give the final answer"
        yield f"  system_prompt: {what} within \\boxed{{}}."
    elif settings.form == "whole" and not settings.is_embedded and table.are_texts:
        yield "  system_prompt: Give only the answer."
    yield f"  test_size: {settings.test_size}  # of {len(table.rows)} prompts, held out to measure accuracy"
    yield f"  max_prompt_length: {settings.prompt_length}  # tokens; longer prompts are dropped"


def _rewards(settings: Settings) -> Iterator[str]:
    yield "rewards:"
    yield f"  - name: {_quoted(f'{settings.module}:score')}  # trained on; in {settings.module}.py"
    yield "  - name: answer_reward  # weight 0: measured as accuracy, not trained on"
    yield "    weight: 0.0"
    yield f"    params: {{find: {settings.form}}}"


def _rloo(settings: Settings) -> Iterator[str]:
    embedded, built_in, usual = settings.is_embedded, settings.is_built_in, _written(LORA_LEARNING_RATE)
    yield "rloo:"
    yield f"  max_steps: {60 if embedded else 40 if built_in else 200}"
    if built_in:
        rate = EMBEDDED_LEARNING_RATE if embedded else SMOLLM2_LEARNING_RATE
        yield f"  learning_rate: {_written(rate)}  # for a small model; the default is {usual}"
    else:
        yield f"  learning_rate: {usual}  # lower if entropy drops fast, raise if reward is flat"
        yield "  lr_scheduler_type: constant_with_warmup"
        yield "  warmup_steps: 5"
    if settings.on_cuda and not embedded:
        yield "  optim: adamw_8bit"
    if settings.memory != "fast":
        yield f"  memory: {settings.memory}  # one sequence per pass; fast did not fit"
    yield f"  num_generations: {GENERATIONS}  # K completions per prompt, each other's baseline"
    yield (
        f"  per_device_train_batch_size: {settings.prompts * GENERATIONS}  # completions per step: {settings.prompts} "
        f"prompts x {GENERATIONS}"
    )
    included = ", thinking included" if settings.thinks else ""
    yield f"  max_completion_length: {settings.completion_length}  # tokens{included}"
    if settings.thinking_budget is not None:
        yield f"  thinking_budget: {settings.thinking_budget}  # tokens, after which thinking is closed by force"
        yield "  answer_budget: 512  # tokens for the answer after that"
        yield "  thinking_close: sentence"
    yield f"  beta: 0.0  # no KL penalty{', which would reward shorter thinking' if settings.thinks else ''}"


def _eval(settings: Settings) -> Iterator[str]:
    yield "eval:"
    if not settings.is_embedded:
        yield f"  num_prompts: {min(settings.test_size, 100)}  # held-out prompts to use"
        yield "  greedy: false"
    yield f"  batch_size: {settings.eval_batch}  # completions generated at once"


_JINJA = Environment("<%", "%>", "<<", ">>", trim_blocks=True, keep_trailing_newline=True)
_FINDERS = {"boxed": "find_boxed", "last_number": "find_last_number", "whole": "str.strip"}
# A right answer, a wrong one in the right form, and 1,000, as a model writes them.
_FORMS = {
    "boxed": (r"so \\boxed{{{GOLD}}}", r"so \\boxed{no such answer}", r"\\boxed{1,000}"),
    "last_number": ("so it is {GOLD}.", "so it is -98765.", "**1,000**"),
    "whole": ("{GOLD}", "no such answer", "1,000"),
}

_REWARD = """\
\"\"\"The reward of << file >>: 1.0 for the right answer, 0.1 for a wrong answer in the right form, else 0.0.

Answers are found and compared by the functions of answer_reward, which the evaluation measures, so the two agree. It
uses TRL's calling convention and runs in its own process. Edit it together with its test; the contract is in
docs/rewarding.md of rloo-kit.
\"\"\"

from rloo_kit.rewards.answer import answers_agree<% if "." not in finder %>, << finder >><% endif %>, has_no_answer
from rloo_kit.rewards.text import << "answer_text, as_ids, as_text" if thinks else "as_text" >>


def score(completions, << "completion_ids, " if thinks >>answer, << "think_end_id, " if thinks >>**columns):
    \"\"\"One number per completion; None if the row has no answer.

    Args:
        completions: texts or conversations. answer: gold answers, one per completion.
<% if thinks %>
        completion_ids: token ids of the completions, unpadded. think_end_id: id of </think>; rloo-kit passes the
            tokenizer's. Ids decide whether the thinking has ended: text can spell the tag in other tokens.
<% endif %>
    \"\"\"
    scores = []
<% if thinks %>
    for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
        answered = answer_text(as_text(text), as_ids(ids), think_end_id, thinking=True)  # None: it is still thinking
        found = << finder >>(answered or "")
<% else %>
    for text, gold in zip(completions, answer, strict=True):
        found = << finder >>(as_text(text))
<% endif %>
        if has_no_answer(gold):
            scores.append(None)
        elif not found:
            scores.append(0.0)
        else:
            scores.append(1.0 if answers_agree(found, str(gold)) else 0.1)
    return scores
"""

_TEST = """\
\"\"\"Tests of the reward of << file >>. Run: pytest test_<< module >>.py\"\"\"

from << module >> import score

GOLD = << gold >>  # the answer of the first row
<% if thinks %>
END = 7  # of </think>; rloo-kit passes the tokenizer's


def rate(answer, ids=(END, 1), gold=GOLD):
    return score([f"some thoughts</think>{answer}"], [list(ids)], [gold], think_end_id=END)[0]
<% else %>


def rate(answer, gold=GOLD):
    return score([answer], answer=[gold])[0]
<% endif %>


def test_right_answer_gets_full_reward():
    assert rate(f"<< right >>") == 1.0


def test_wrong_answer_gets_a_little_and_no_answer_gets_nothing():
    assert rate("<< wrong >>") == 0.1
    assert rate("") == 0.0


def test_numbers_are_compared_as_numbers():
    assert rate("<< thousand >>", gold="1000") == 1.0


def test_row_without_gold_answer_is_not_scored():
    assert rate(f"<< right >>", gold=None) is None
<% if thinks %>


def test_unclosed_thinking_has_no_answer():
    \"\"\"Text can spell </think> in ordinary tokens; only the id ends the thinking.\"\"\"
    assert rate(f"<< right >>", ids=(1, 2)) == 0.0
<% endif %>
"""


def make_reward(settings: Settings) -> str:
    """The text of the reward's file."""
    values = {"file": settings.file.name, "finder": _FINDERS[settings.form], "thinks": settings.thinks}
    return _JINJA.from_string(_REWARD).render(values)


def make_test(settings: Settings) -> str:
    """The text of the reward's test, which needs only rloo-kit and pytest."""
    gold = settings.table.gold
    if gold.count("{") != gold.count("}") or THINK_END in gold:  # no completion could give such an answer
        gold = "42"
    values = dict(zip(("right", "wrong", "thousand"), _FORMS[settings.form], strict=True))
    values |= {"file": settings.file.name, "module": settings.module, "gold": _quoted(gold)}
    return _JINJA.from_string(_TEST).render(values, thinks=settings.thinks)

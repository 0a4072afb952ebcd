"""The files of a first run: config with a comment for each key that matters, reward function, and its test."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.config.batches import GENERATIONS
from rloo_kit.config.schema import LORA_LEARNING_RATE
from rloo_kit.data.byte_tokens import token_ids
from rloo_kit.plan.result import VramPlan
from rloo_kit.starter.table import Table
from rloo_kit.think_tags import QWEN3_IDS, THINK_END

EMBEDDED_LEARNING_RATE = 2e-3  # of the embedded configs: a tiny model needs a higher rate


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
        return self.model.startswith("embedded/")

    @property
    def think_end_id(self) -> int | None:
        """Id of `</think>`, which the reward looks for; None for a model that does not think."""
        known = token_ids("compact")[THINK_END] if self.is_embedded else QWEN3_IDS[THINK_END]
        return known if self.thinks else None

    @property
    def form(self) -> str:
        """Where the answer is: all text after the thinking (whole), or the last box in it (boxed)."""
        return "whole" if self.is_embedded else "boxed"


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
    yield f"  max_seq_length: {whole}  # tokens, prompt and completion together"
    if settings.on_cuda and not settings.is_embedded:
        yield "  load_in_4bit: true  # false is faster if it fits; check with rloo-kit plan"
        yield "  gradient_checkpointing: unsloth"
    elif not settings.is_embedded:
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
    yield f"  test_size: {settings.test_size}  # of {table.num_rows} prompts, held out to measure accuracy"
    yield f"  max_prompt_length: {settings.prompt_length}  # tokens; longer prompts are dropped"


def _rewards(settings: Settings) -> Iterator[str]:
    yield "rewards:"
    yield f"  - name: {_quoted(f'{settings.module}:score')}  # trained on; in {settings.module}.py"
    end = _quoted(settings.think_end_id)
    yield f"    params: {{think_end_id: {end}}}  # id of {THINK_END}; null: no thinking"
    yield "  - name: answer_reward  # weight 0: measured as accuracy, not trained on"
    yield "    weight: 0.0"
    yield f"    params: {{find: {settings.form}}}"


def _rloo(settings: Settings) -> Iterator[str]:
    embedded, usual = settings.is_embedded, _written(LORA_LEARNING_RATE)
    yield "rloo:"
    yield f"  max_steps: {60 if embedded else 200}"
    if embedded:
        yield f"  learning_rate: {_written(EMBEDDED_LEARNING_RATE)}  # for a tiny model; the default is {usual}"
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
    yield f"  max_completion_length: {settings.completion_length}  # tokens, thinking included"
    if settings.thinking_budget is not None:
        yield f"  thinking_budget: {settings.thinking_budget}  # tokens, after which thinking is closed by force"
        yield "  answer_budget: 512  # tokens for the answer after that"
        yield "  thinking_close: sentence"
    yield "  beta: 0.0  # no KL penalty, which would reward shorter thinking"


def _eval(settings: Settings) -> Iterator[str]:
    yield "eval:"
    if not settings.is_embedded:
        yield f"  num_prompts: {min(settings.test_size, 100)}  # held-out prompts to use"
        yield "  greedy: false"
    yield f"  batch_size: {settings.eval_batch}  # completions generated at once"


_FIND = {
    "boxed": '''\
def find_answer(text):
    """The content of the last \\\\boxed{...} in a completion; None without one."""
    start = text.rfind("\\\\boxed{")
    depth = 0
    for place in range(start + len("\\\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\\\boxed{") : place].strip()
    return None
''',
    "whole": '''\
def find_answer(text):
    """The text after the thinking; None if it is empty."""
    return text.strip() or None
''',
}

_REWARD = '''\
"""The reward of NAME.yaml: 1.0 for the right answer, 0.1 for a wrong answer in the right form, else 0.0.

It uses TRL's calling convention and runs in its own process. Edit it together with its test; the contract is in
docs/rewarding.md of rloo-kit.
"""

from fractions import Fraction


FINDdef same(found, gold):
    """Whether two answers are the same text, or the same number (42 and 42.0, 1,000 and 1000, 1/2 and 0.5)."""
    if found.strip() == gold.strip():
        return True
    if max(len(found), len(gold)) > 40 or "e" in (found + gold).lower():  # not a plausible number
        return False
    try:
        return Fraction(found.replace(",", "")) == Fraction(gold.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False


def score(completions, completion_ids, answer, think_end_id=THINK_END_ID, **columns):
    """One number per completion; None if the row has no answer.

    Args:
        completions: the texts. completion_ids: their token ids, unpadded. answer: gold answers, one per completion.
        think_end_id: id of </think>. Ids decide whether thinking has ended: text can spell the tag in other tokens.
    """
    scores = []
    for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
        if gold is None or not str(gold).strip():
            scores.append(None)
            continue
        text = text if isinstance(text, str) else text[-1]["content"]  # a conversation, in a bare TRL trainer
        closed = think_end_id is None or think_end_id in list(ids)
        found = find_answer(text.rpartition("</think>")[2]) if closed else None
        scores.append(0.0 if found is None else 1.0 if same(found, str(gold)) else 0.1)
    return scores
'''

_TEST = '''\
"""Tests of the reward of NAME.yaml. Run: pytest test_MODULE.py"""

from MODULE import score

END = THINK_END_ID  # the id of </think>
GOLD = GOLD_TEXT  # the answer of the first row


def rate(text, ids=(END, 1), gold=GOLD):
    return score([text], [list(ids)], [gold], think_end_id=END)[0]


def test_right_answer_gets_full_reward():
    assert rate(f"some thoughts</think>RIGHT") == 1.0


def test_wrong_answer_gets_a_little_and_no_answer_gets_nothing():
    assert rate("some thoughts</think>WRONG") == 0.1
    assert rate("some thoughts</think>") == 0.0


def test_numbers_are_compared_as_numbers():
    assert rate("</think>THOUSAND", gold="1000") == 1.0


def test_row_without_gold_answer_is_not_scored():
    assert rate(f"</think>RIGHT", gold=None) is None
'''

_UNCLOSED = '''

def test_unclosed_thinking_has_no_answer():
    """Text can spell </think> in ordinary tokens; only the id ends the thinking."""
    assert rate(f"some thoughts</think>RIGHT", ids=(1, 2)) == 0.0
'''


def make_reward(settings: Settings) -> str:
    """The text of the reward's file."""
    text = _REWARD.replace("FIND", _FIND[settings.form] + "\n\n").replace("THINK_END_ID", str(settings.think_end_id))
    return text.replace("NAME.yaml", settings.file.name)


def make_test(settings: Settings) -> str:
    """The text of the reward's test, which needs only the standard library and pytest."""
    boxed, gold = settings.form == "boxed", settings.table.gold
    if gold.count("{") != gold.count("}") or THINK_END in gold:  # no completion could give such an answer
        gold = "42"
    text = _TEST + (_UNCLOSED if settings.thinks else "")
    words = {
        "THINK_END_ID": str(settings.think_end_id),
        "RIGHT": r"so \\boxed{{{GOLD}}}" if boxed else "{GOLD}",
        "WRONG": r"so \\boxed{no such answer}" if boxed else "no such answer",
        "THOUSAND": r"\\boxed{1,000}" if boxed else "1,000",
        "MODULE": settings.module,
        "NAME.yaml": settings.file.name,
        "GOLD_TEXT": _quoted(gold),  # last: it may contain any of these words
    }
    for word, value in words.items():
        text = text.replace(word, value)
    return text

"""The texts of a first run: its file with a comment for each key that matters, a reward, and the reward's test."""

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

EMBEDDED_LEARNING_RATE = 2e-3  # of the embedded configs: a tiny model wants more than one of billions


@dataclass(frozen=True)
class Settings:
    """What a run's file is made from; lengths in tokens.

    Attributes:
        file: of the run. module: of its reward. table: the data. thinks: whether the model does, by its name.
        prompts: of a step. eval_batch: completions at once in the evaluation.
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
        """Of `</think>`, which the reward decides by; None for a model that does not think."""
        known = token_ids("compact")[THINK_END] if self.is_embedded else QWEN3_IDS[THINK_END]
        return known if self.thinks else None

    @property
    def form(self) -> str:
        """Where the answer stands: all that follows the thinking, or the last box in it."""
        return "whole" if self.is_embedded else "boxed"


def _written(rate: float) -> str:
    """A rate as people write it.

    >>> _written(2e-3)
    '2e-3'
    """
    return f"{rate:.0e}".replace("e-0", "e-")


def _quoted(value: Any) -> str:
    """A value as YAML and Python take it: text in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def make_header(settings: Settings, plan: VramPlan) -> str:
    """The comment at the top: how to run it, how much a step is, and what it takes by the plan."""
    completions, length = settings.prompts * GENERATIONS, settings.completion_length
    test = settings.file.with_name(f"test_{settings.module}.py")
    rollout = f"{settings.prompts} prompts x {GENERATIONS} generations = {completions} completions"
    return f"""\
# {settings.model} on {settings.table.source}, written by rloo-kit init.
#
# Run:     rloo-kit train {settings.file}          (rloo-kit config {settings.file}: every key)
# Reward:  {settings.module}.py, yours to change; its test: pytest {test}
# Step:    1 rollout = {rollout} x at most {length} tokens, {plan.rows} of them at once.
# Memory:  {plan.rollout_gib:.1f} GiB in a rollout, {plan.training_gib:.1f} GiB in training, of \
{plan.machine.usable_gib:.1f} GiB on {plan.machine.name} (computed, not measured).

"""


def make_body(settings: Settings) -> str:
    """The keys of the run's file."""
    sections = (_model, _data, _rewards, _rloo, _eval)
    return "\n".join("\n".join(section(settings)) + "\n" for section in sections)


def _model(settings: Settings) -> Iterator[str]:
    whole = settings.prompt_length + settings.completion_length
    yield "model:"
    yield f"  name: {_quoted(settings.model)}"
    yield f"  max_seq_length: {whole}  # tokens of prompt and completion together"
    if settings.on_cuda and not settings.is_embedded:
        yield "  load_in_4bit: true  # false is faster where it fits: rloo-kit plan says so"
        yield "  gradient_checkpointing: unsloth"
    elif not settings.is_embedded:
        yield "  gradient_checkpointing: true"
    yield "  lora: {r: 16, alpha: 16}  # null trains every parameter; then take a tenth of the rate"


def _data(settings: Settings) -> Iterator[str]:
    table = settings.table
    yield "data:"
    yield f"  source: {_quoted(table.source)}"
    yield f"  prompt_column: {_quoted(table.prompt_column)}"
    yield f"  answer_column: {_quoted(table.answer_column)}"
    if table.answer_after is not None:
        yield f"  answer_after: {_quoted(table.answer_after)}  # the gold answer is what follows it"
    if settings.form == "boxed" and table.are_texts:
        what = "Give the final answer, a number," if table.are_numbers else "Give the final answer"
        yield f"  system_prompt: {what} within \\boxed{{}}."
    yield f"  test_size: {settings.test_size}  # held-out prompts, of {table.num_rows}: accuracy before and after"
    yield f"  max_prompt_length: {settings.prompt_length}  # tokens; longer prompts are left out"


def _rewards(settings: Settings) -> Iterator[str]:
    yield "rewards:"
    yield f"  - name: {_quoted(f'{settings.module}:score')}  # trained on; {settings.module}.py"
    end = _quoted(settings.think_end_id)
    yield f"    params: {{think_end_id: {end}}}  # of {THINK_END}; null: the model does not think"
    yield "  - name: answer_reward  # measured, not trained on: accuracy"
    yield "    weight: 0.0"
    yield f"    params: {{find: {settings.form}}}"


def _rloo(settings: Settings) -> Iterator[str]:
    embedded, usual = settings.is_embedded, _written(LORA_LEARNING_RATE)
    yield "rloo:"
    yield f"  max_steps: {60 if embedded else 200}"
    if embedded:
        yield f"  learning_rate: {_written(EMBEDDED_LEARNING_RATE)}  # a tiny model's; {usual} is the default"
    else:
        yield f"  learning_rate: {usual}  # lower it if entropy falls fast, raise it if reward is flat"
        yield "  lr_scheduler_type: constant_with_warmup"
        yield "  warmup_steps: 5"
    if settings.on_cuda and not embedded:
        yield "  optim: adamw_8bit"
    if settings.memory != "fast":
        yield f"  memory: {settings.memory}  # one sequence in a pass; fast did not fit"
    yield f"  num_generations: {GENERATIONS}  # completions of each prompt, K; they are each other's baseline"
    yield (
        f"  per_device_train_batch_size: {settings.prompts * GENERATIONS}  # completions of a step: {settings.prompts} "
        f"prompts x {GENERATIONS}"
    )
    yield f"  max_completion_length: {settings.completion_length}  # tokens, thinking included"
    if settings.thinking_budget is not None:
        yield f"  thinking_budget: {settings.thinking_budget}  # then thinking is closed for the model"
        yield "  answer_budget: 512  # and it answers"
        yield "  thinking_close: sentence"
    yield "  beta: 0.0  # no KL penalty: it pays for thinking less"


def _eval(settings: Settings) -> Iterator[str]:
    yield "eval:"
    if not settings.is_embedded:
        yield f"  num_prompts: {min(settings.test_size, 100)}  # of the held-out ones"
        yield "  greedy: false"
    yield f"  batch_size: {settings.eval_batch}  # completions at once"


_FIND = {
    "boxed": '''\
def find_answer(text):
    """What stands in the last \\\\boxed{...} of a completion; None without one."""
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
    """All that a completion says after its thinking; None if that is nothing."""
    return text.strip() or None
''',
}

_REWARD = '''\
"""The reward of NAME.yaml: 1.0 for the right answer, 0.1 for another one in the right form, else 0.0.

It is called as TRL calls rewards, and runs in a process of its own. Change it, and its test with it:
docs/rewarding.md of rloo-kit has the contract.
"""

from fractions import Fraction


FINDdef same(found, gold):
    """Whether two answers are the same text, or the same number (42 and 42.0, 1,000 and 1000, 1/2 and 0.5)."""
    if found.strip() == gold.strip():
        return True
    if max(len(found), len(gold)) > 40 or "e" in (found + gold).lower():  # no number that anybody writes as an answer
        return False
    try:
        return Fraction(found.replace(",", "")) == Fraction(gold.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False


def score(completions, completion_ids, answer, think_end_id=THINK_END_ID, **columns):
    """One number for each completion; None where the data has no answer.

    Args:
        completions: the texts. completion_ids: their tokens, unpadded. answer: the data's, one for each completion.
        think_end_id: of </think>. Ids decide whether thinking has ended: a text can spell the tag in other tokens.
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
"""The reward of NAME.yaml does what it says: pytest test_MODULE.py"""

from MODULE import score

END = THINK_END_ID  # the id of </think>
GOLD = GOLD_TEXT  # of the first row


def rate(text, ids=(END, 1), gold=GOLD):
    return score([text], [list(ids)], [gold], think_end_id=END)[0]


def test_a_right_answer_earns_most():
    assert rate(f"some thoughts</think>RIGHT") == 1.0


def test_a_wrong_answer_earns_less_than_a_right_one_and_no_answer_nothing():
    assert rate("some thoughts</think>WRONG") == 0.1
    assert rate("some thoughts</think>") == 0.0


def test_numbers_are_compared_as_numbers():
    assert rate("</think>THOUSAND", gold="1000") == 1.0


def test_a_sample_without_an_answer_is_left_out():
    assert rate(f"</think>RIGHT", gold=None) is None
'''

_UNCLOSED = '''

def test_thinking_that_is_not_closed_has_no_answer_yet():
    """A text can spell </think> in ordinary tokens; the id says whether thinking has ended."""
    assert rate(f"some thoughts</think>RIGHT", ids=(1, 2)) == 0.0
'''


def make_reward(settings: Settings) -> str:
    """The reward's file."""
    text = _REWARD.replace("FIND", _FIND[settings.form] + "\n\n").replace("THINK_END_ID", str(settings.think_end_id))
    return text.replace("NAME.yaml", settings.file.name)


def make_test(settings: Settings) -> str:
    """The test of the reward: standard library only, besides pytest."""
    boxed, gold = settings.form == "boxed", settings.table.gold
    if gold.count("{") != gold.count("}") or THINK_END in gold:  # which no completion could give as its answer
        gold = "42"
    text = _TEST + (_UNCLOSED if settings.thinks else "")
    words = {
        "THINK_END_ID": str(settings.think_end_id),
        "RIGHT": r"so \\boxed{{{GOLD}}}" if boxed else "{GOLD}",
        "WRONG": r"so \\boxed{no such answer}" if boxed else "no such answer",
        "THOUSAND": r"\\boxed{1,000}" if boxed else "1,000",
        "MODULE": settings.module,
        "NAME.yaml": settings.file.name,
        "GOLD_TEXT": _quoted(gold),  # last: it may hold any of these words
    }
    for word, value in words.items():
        text = text.replace(word, value)
    return text

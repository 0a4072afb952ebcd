"""The rewards of a run, called before its model is loaded: on made-up completions of a row of its data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import RlooKitError
from rloo_kit.preflight.faults import Fault
from rloo_kit.rewarding.guard import guard
from rloo_kit.rewarding.models import NEEDS_MATH_VERIFY
from rloo_kit.rewarding.registry import build_reward, check_reward_name
from rloo_kit.system.versions import is_importable
from rloo_kit.think_tags import THINK_END

KINDS = 5  # of made-up completions
NOT_CALLED = ("reward_model",)  # its weights are loaded on the first call
THOUGHT = "Let me think.\n"
# What a model may write that no one expects: tags twice, brackets that never close, other scripts, a huge number.
HOSTILE = f"{THINK_END}{THINK_END}\\boxed{{{{\\frac{{1}}{{0}}${'9' * 400}\x00\ufffd <b>None</b> NaN 🙂 ﷽ %s {{}} \\"


@dataclass(frozen=True)
class MadeUp:
    """A completion that no model wrote: what it stands for, its text without special tokens, and its ids, (C,)."""

    kind: str
    text: str
    ids: list[int]


def make_completions(tokenizer: Any, thinking: bool, answer: str | None) -> list[MadeUp]:
    """Completions of one prompt, as the loop would pass them.

    Args:
        thinking: whether the model closes a thought first. answer: the gold answer, None without one.
    """
    opening = f"{THOUGHT}{THINK_END}\n\n" if thinking else ""
    ending = tokenizer.eos_token or ""
    right = "the answer" if answer is None else answer
    texts = {
        "with the gold answer": f"{opening}{right}{ending}",
        "with the gold answer in a box": f"{opening}\\boxed{{{right}}}{ending}",
        "that is empty": ending,
        "that is truncated": THOUGHT,
        "that is nonsense": f"{HOSTILE}{ending}",
    }
    made = []
    for kind, text in texts.items():
        ids = list(tokenizer(text)["input_ids"]) if text else []
        made.append(MadeUp(kind, tokenizer.decode(ids, skip_special_tokens=True) if ids else "", ids))
    return made


def find_reward_faults(
    run: RunConfig, tokenizer: Any | None, thinking: bool, row: dict[str, Any] | None
) -> Iterator[Fault]:
    """Faults of `run.rewards`.

    Args:
        tokenizer: None where it is not here yet: then names are checked and own functions imported.
        row: a row of the training data with `prompt` (rendered), `answer` and the other columns; None where the data
            cannot be read: then nothing is called.
    """
    scores: dict[str, float] = {}
    scored = False
    for index, entry in enumerate(run.rewards):
        key = f"rewards.{index}"
        if entry.name == "math_answer_reward" and not is_importable("math_verify"):
            yield Fault("rewards", f"{key}.name: {NEEDS_MATH_VERIFY}")
            continue
        try:
            if tokenizer is None and ":" not in entry.name:
                check_reward_name(key, entry.name)
                continue
            reward = build_reward(run, tokenizer, entry, key)
        except RlooKitError as error:
            yield Fault("rewards", str(error))
            continue
        if row is None or tokenizer is None or entry.name in NOT_CALLED:
            _close(reward)
            continue
        made = make_completions(tokenizer, thinking, row.get("answer"))
        try:
            guarded, values = _call(run, reward, made, row)
        except RlooKitError as error:
            yield Fault("rewards", f"{key}.name '{entry.name}': {error}")
            continue
        finally:
            _close(reward)
        failed = [(one.kind, problem) for one, problem in zip(made, guarded.problems, strict=True) if problem]
        if failed:
            kinds = "any made-up completion" if len(failed) == len(made) else f"a completion {failed[0][0]}"
            yield Fault(
                "rewards",
                f"{key}.name '{entry.name}' cannot score {kinds}: {failed[0][1]}. A run has such completions: return "
                "a number for each, or None where the reward does not apply",
            )
        for one, value in zip(made, values, strict=True):
            if value is not None:
                scored = True
                scores[one.kind] = scores.get(one.kind, 0.0) + entry.weight * value
    if row is not None and tokenizer is not None and not any(entry.name in NOT_CALLED for entry in run.rewards):
        yield from _find_no_signal(run, scores, scored)


def _find_no_signal(run: RunConfig, scores: dict[str, float], scored: bool) -> Iterator[Fault]:
    """Rewards that tell nothing apart; a warning, because the row may belong to no reward's task."""
    listed = ", ".join(entry.name for entry in run.rewards)
    if not scored:
        yield Fault(
            "rewards",
            f"rewards: none of {listed} scored any made-up completion of the first row (all returned None); check "
            "data.answer_column and the columns that they read",
            "warning",
        )
    elif len(scores) == KINDS and len(set(scores.values())) == 1:
        value = next(iter(scores.values()))
        yield Fault(
            "rewards",
            f"rewards: {listed} give {value:g} to the gold answer, to an empty completion, to a truncated one and to "
            "nonsense alike, on the first row; what earns the same teaches nothing",
            "warning",
        )


def _call(run: RunConfig, reward: Any, made: list[MadeUp], row: dict[str, Any]) -> tuple[Any, list[float | None]]:
    columns = {name: [value] * len(made) for name, value in row.items() if name != "prompt"}
    if run.rloo.thinking_budget is not None:
        columns["thinking_forced"] = [False] * len(made)
    guarded = guard(reward, columns)
    values = guarded(
        prompts=[row["prompt"]] * len(made),
        completions=[one.text for one in made],
        completion_ids=[one.ids for one in made],
        trainer_state=None,
        log_extra=lambda name, values: None,
        log_metric=lambda name, value: None,
        **columns,
    )
    return guarded, values


def _close(reward: Any) -> None:
    """End the process of a reward that has one; the run starts its own."""
    worker = vars(reward).get("worker")  # of MathAnswerReward only once it was started
    if worker is not None:
        worker.close()

"""Call the rewards of a run before its model is loaded, on made-up completions of a row of its data."""

from typing import Any, NamedTuple

from rloo_kit.config.run import RunConfig
from rloo_kit.data.answers import GYM_REWARD, answer_reward_of
from rloo_kit.data.gym import require_library
from rloo_kit.errors import RlooKitError
from rloo_kit.rewarding.guard import guard, is_async, reward_name
from rloo_kit.rewarding.registry import REGISTRY, build_reward, check_reward_name
from rloo_kit.rewarding.signature import weighted_sum
from rloo_kit.rewarding.verifiers import NEEDS_MATH_VERIFY, RewardModel
from rloo_kit.rewarding.worker import close_worker
from rloo_kit.system.problems import Problem, catching
from rloo_kit.system.versions import is_importable
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking

THOUGHT = "Let me think.\n"
GAPS = ("", "\n", "\n\n")  # between the parts of a completion, as patterns of published rewards have them
# Unexpected output that a model may write: tags twice, brackets that never close, other scripts, a huge number.
HOSTILE = f"{THINK_END}{THINK_END}\\boxed{{{{\\frac{{1}}{{0}}${'9' * 400}\x00\ufffd <b>None</b> NaN 🙂 ﷽ %s {{}} \\"


class MadeUp(NamedTuple):
    """A made-up completion: what it represents, its text without special tokens, and its ids, (C,)."""

    kind: str
    text: str
    ids: list[int]


def _make_completions(tokenizer: Any, thinking: bool, answer: Any) -> list[MadeUp]:
    """Completions of one prompt, as the loop would pass them; `answer` is the gold answer, None without one."""
    opening = f"{THOUGHT}{THINK_END}\n\n" if thinking else ""
    ending = tokenizer.eos_token or ""
    right = "the answer" if answer is None else answer
    texts = {
        "with the gold answer": f"{opening}{right}{ending}",
        "with the gold answer in a box": f"{opening}\\boxed{{{right}}}{ending}",
        "with the gold answer in its tags": f"{opening}<answer>{right}</answer>{ending}",
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
) -> list[Problem]:
    """Problems of `run.rewards`: builds, calls and closes each reward.

    Args:
        tokenizer: None if it is not on this machine yet: then names are checked and the user's functions imported.
        row: a row of the training data with `prompt` (rendered), `answer` and the other columns; None if the data
            cannot be read: then nothing is called.
    """
    made = [] if row is None or tokenizer is None else _make_completions(tokenizer, thinking, row.get("answer"))
    faults: list[Problem] = []
    scores: list[list[float | None] | None] = []
    for index, entry in enumerate(run.rewards):
        key, reward = f"rewards.{index}", None
        with catching("rewards", faults):
            if entry.name == "math_answer_reward" and not is_importable("math_verify"):
                raise RlooKitError(f"{key}.name: {NEEDS_MATH_VERIFY}")
            if entry.name == GYM_REWARD:
                require_library(f"{key}.name: {GYM_REWARD}")
            if tokenizer is None and ":" not in entry.name:
                check_reward_name(key, entry.name)
            else:
                reward = build_reward(run, tokenizer, entry, key)
        called = None
        if reward is not None:
            try:
                if made and row is not None:
                    called = _try_reward(run, reward, f"{key}.name '{entry.name}'", made, row, faults)
            finally:
                close_worker(reward)
        scores.append(called)
    weights = [entry.weight for entry in run.rewards]
    return faults + _find_no_signal(scores, weights, [entry.name for entry in run.rewards])


def find_given_faults(
    run: RunConfig, tokenizer: Any, thinking: bool, row: dict[str, Any], reward_funcs: list[Any]
) -> list[Problem]:
    """The same for rewards that are already built, or made in Python."""
    made = _make_completions(tokenizer, thinking, row.get("answer"))
    faults: list[Problem] = []
    names = list(map(reward_name, reward_funcs))
    scores = [
        _try_reward(run, reward, f"rewards.{index} '{name}'", made, row, faults)
        for index, (reward, name) in enumerate(zip(reward_funcs, names, strict=True))
    ]
    return faults + _find_no_signal(scores, [getattr(reward, "weight", 1.0) for reward in reward_funcs], names)


def _try_reward(
    run: RunConfig, reward: Any, name: str, made: list[MadeUp], row: dict[str, Any], faults: list[Problem]
) -> list[float | None] | None:
    """Call a reward on all completions and append what is wrong to `faults`. Returns its values; None if it was not
    called, or cannot score all of them."""
    inner = getattr(reward, "reward", reward)
    if isinstance(inner, RewardModel) or not callable(inner) or hasattr(inner, "forward") or is_async(inner):
        return None  # the first call would load weights, or only a trainer can await it
    texts = [one.text for one in made]
    if opens_thinking(row["prompt"]):
        parts = THINK_START, THOUGHT.strip(), THINK_END, "<answer>", str(row.get("answer")), "</answer>"
        texts += [gap.join(parts) for gap in GAPS]
    columns = {column: [value] * len(texts) for column, value in row.items() if column != "prompt"}
    if run.rloo.thinking_budget is not None:
        columns["thinking_forced"] = [False] * len(texts)
    try:
        guarded = guard(reward, columns)
        scored = guarded.score(
            prompts=[row["prompt"]] * len(texts),
            completions=texts,
            completion_ids=[one.ids for one in [*made, *made][: len(texts)]],
            trainer_state=None,
            log_extra=lambda name, values: None,
            log_metric=lambda name, value: None,
            **columns,
        )
    except RlooKitError as error:
        faults.append(Problem("rewards", f"{name}: {error}"))
        return None
    values, opened = scored.values[: len(made)], scored.values[len(made) :]
    failed = [(one.kind, problem) for one, problem in zip(made, scored.problems, strict=False) if problem]
    if failed:
        kinds = "any made-up completion" if len(failed) == len(made) else f"a completion {failed[0][0]}"
        found = f"{name} cannot score {kinds}: {failed[0][1]}. A run has such completions"
        fix = "return a number for each, or None where the reward does not apply"
        faults.append(Problem("rewards", found, fix))
        return None
    if len(set(values)) == 1 and values[0] is not None and any((value or 0.0) > values[0] for value in opened):
        found = f"{name} gives every completion {values[0]:g}, and more to one that begins with {THINK_START}. "
        found += "None does: the chat template opens it in the prompt"
        fix = "make it optional in the pattern, or remove it"
        faults.append(Problem("rewards", found, fix, level="warning"))
    return values


def _find_no_signal(scores: list[list[float | None] | None], weights: list[float], names: list[str]) -> list[Problem]:
    """Rewards that do not distinguish completions: a warning, because this row may belong to no reward's task. What a
    reward of the user's pays for is not known, so it may well give all of these nothing; the probe judges it.

    Args:
        scores: of each reward its values; None if they are not known, and then nothing is.
    """
    known = [one for one in scores if one is not None]
    if not known or len(known) < len(scores):
        return []
    sums = [weighted_sum(values, weights) for values in zip(*known, strict=True)]
    listed, right = ", ".join(names), "the gold answer" if answer_reward_of(names) else "an answer"
    if all(one is None for one in sums):
        paid = ", ".join(name for name, weight in zip(names, weights, strict=True) if weight)
        found = f"rewards: none of {paid} scored any made-up completion of the first row (all returned None)"
        fix = "check data.answer_column and the columns that they read"
        return [Problem("rewards", found, fix, level="warning")]
    value = sums[0]
    if value is None or len(set(sums)) > 1 or (value <= 0 and not REGISTRY.keys() >= set(names)):
        return []
    found = f"rewards: {listed} give {value:g} to {right}, to an empty completion, to a truncated one and to "
    found += "nonsense alike, on the first row; what earns the same teaches nothing"
    return [Problem("rewards", found, level="warning")]

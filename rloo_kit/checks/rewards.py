"""Call the rewards of a run before its model is loaded, on made-up completions of a row of its data."""

from collections.abc import Sequence
from typing import Any

from rloo_kit.completion import Completion, Episode
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import has_thinking_budget
from rloo_kit.data.answers import GYM_REWARD, ROW_REWARDS, answer_reward_of, names_in
from rloo_kit.data.chat import template_options
from rloo_kit.errors import ConfigError, DataError, RewardError, RlooKitError
from rloo_kit.graders.code import CodeReward
from rloo_kit.graders.code_tests import TEST_COLUMNS, find_row_faults
from rloo_kit.graders.judge import BASE, NO_COLUMN, Judge, build_judge, task_text
from rloo_kit.graders.scoring_model import RewardModel, find_model_fault
from rloo_kit.graders.verifier import NEEDS_MATH_VERIFY
from rloo_kit.rewarding.guard import guard, is_async, log_names, reward_name
from rloo_kit.rewarding.registry import REGISTRY, build_reward, check_reward_name
from rloo_kit.rewarding.score import make_columns, score
from rloo_kit.rewarding.signature import CONVENTION, weighted_sum
from rloo_kit.rewarding.worker import close_worker
from rloo_kit.system.problems import Problem, catching
from rloo_kit.system.versions import is_importable
from rloo_kit.tasks.gym import require_library
from rloo_kit.think_tags import THINK_END, THINK_START, opens_thinking
from rloo_kit.tools.toolbox import EnvironmentReward, open_toolbox
from rloo_kit.tools.turns import ToolFormat

THOUGHT = "Let me think.\n"
GAPS = ("", "\n", "\n\n")  # between the parts of a completion, as patterns of published rewards have them
# Unexpected output that a model may write: tags twice, brackets that never close, other scripts, a huge number.
HOSTILE = f"{THINK_END}{THINK_END}\\boxed{{{{\\frac{{1}}{{0}}${'9' * 400}\x00\ufffd <b>None</b> NaN 🙂 ﷽ %s {{}} \\"


def find_reward_faults(
    run: RunConfig,
    tokenizer: Any | None,
    thinking: bool,
    row: dict[str, Any] | None,
    reward_funcs: Sequence[Any] | None = None,
) -> list[Problem]:
    """Problems of `run.rewards`, which are built, called and closed, or of `reward_funcs`, which are built already.

    Args:
        tokenizer: None if it is not on this machine yet: then names are checked and the user's functions imported.
        row: of the training data, with its rendered `prompt`; None if it cannot be read: then nothing is called.
    """
    faults: list[Problem] = []
    names = [entry.name for entry in run.rewards] if reward_funcs is None else list(map(reward_name, reward_funcs))
    scores: list[list[float | None] | None] = []
    is_called = row is not None and tokenizer is not None
    toolbox = open_toolbox(run) if is_called else None
    if row is not None and toolbox is not None and toolbox.environment is not None:
        (started,) = toolbox.reset([0], [row])
        if started.kind == "failed":
            found = f"rloo.environment: {toolbox.environment} cannot start an episode with the first row"
            faults.append(Problem("tools", f"{found} ({', '.join(row)}): {started.detail}"))
            is_called = False
        else:
            with catching("tools", faults):
                form = ToolFormat(tokenizer, thinking, run.model.name, **template_options(run))
                form.observe(row, started.content, toolbox.max_prompt_length)
            row = row | {"environments": toolbox.environments()[0]}
    made = _make_completions(run, tokenizer, thinking, row) if is_called and row is not None else {}
    for index, name in enumerate(names):
        key, reward, called = f"rewards.{index}", reward_funcs and reward_funcs[index], None
        if reward_funcs is None:
            with catching("rewards", faults):
                reward = _build(run, tokenizer, index, key)
                _check_judge(f"{key}.params", reward, run, row)
        try:
            if reward is not None and made:
                where = f"{key}.name '{name}'" if reward_funcs is None else f"{key} '{name}'"
                called = _try_reward(run, reward, where, made, faults)
        finally:
            if reward is not None and reward_funcs is None:
                close_worker(reward)
        scores.append(called)
    if "environments" in (row or {}):  # it is the same for all made-up completions, and may decide their rewards
        return faults
    weighted = run.rewards if reward_funcs is None else reward_funcs
    return faults + _find_no_signal(scores, [getattr(one, "weight", 1.0) for one in weighted], names)


def _make_completions(run: RunConfig, tokenizer: Any, thinking: bool, row: dict[str, Any]) -> dict[str, Completion]:
    """Completions of a row, as the loop would pass them, by what each represents."""
    opening = f"{THOUGHT}{THINK_END}\n\n" if thinking else ""
    ending = tokenizer.eos_token or ""
    right = "the answer" if row.get("answer") is None else row["answer"]
    texts = {
        "with the gold answer": f"{opening}{right}{ending}",
        "with the gold answer in a box": f"{opening}\\boxed{{{right}}}{ending}",
        "with the gold answer in its tags": f"{opening}<answer>{right}</answer>{ending}",
        "that is empty": ending,
        "that is truncated": THOUGHT,
        "that is nonsense": f"{HOSTILE}{ending}",
    }
    made = {}
    for kind, text in texts.items():
        ids = list(tokenizer(text)["input_ids"]) if text else []
        made[kind] = make_up(run, row, tokenizer.decode(ids, skip_special_tokens=True) if ids else "", ids)
    return made


def make_up(run: RunConfig, row: dict[str, Any], text: str, ids: list[int]) -> Completion:
    """A completion of a row that nobody sampled."""
    episode = Episode([{"role": "assistant", "content": text}]) if run.rloo.has_tools else None
    return Completion(ids, text, ended=True, episode=episode, prompt=row["prompt"], row=row)


def _build(run: RunConfig, tokenizer: Any | None, index: int, key: str) -> Any:
    """The reward of an entry; None, its name checked, if it cannot be built without the tokenizer."""
    entry = run.rewards[index]
    if entry.name == "math_answer_reward" and not is_importable("math_verify"):
        raise RlooKitError(f"{key}.name: {NEEDS_MATH_VERIFY}")
    if entry.name == GYM_REWARD:
        require_library(f"{key}.name: {GYM_REWARD}")
    if entry.name == "reward_model" and (fault := find_model_fault(str(entry.params.get("model")))):
        raise ConfigError(f"{key}.params.model: {fault}")
    if tokenizer is None and ":" not in entry.name:
        return check_reward_name(key, entry.name)
    return build_reward(run, tokenizer, entry, key)


def check_row_rewards(run: RunConfig, side: Any) -> None:
    """Refuse, with DataError, a row whose column `rewards` names none of the run's, or another one."""
    if ROW_REWARDS not in side.source.other_names:
        return
    names = log_names([entry.name.rpartition(":")[2] for entry in run.rewards], run.rewards)
    column = side.source.column(ROW_REWARDS)
    for row, named in ((row, names_in(column[row])) for row in side.rows):
        if named is not None and (not named or set(named) - set(names)):
            found = f"{side.source.where(row)}: the column {ROW_REWARDS} is {named}, and the run's rewards are "
            raise DataError(f"{found}{', '.join(names)}; name some of these, or leave it empty for all of them")


def find_code_faults(run: RunConfig, side: Any, kind: str, faults: list[Problem]) -> set[int]:
    """Rows that `code_reward` cannot score: an error if these are all, or a test's form is unknown, else a warning."""
    unscored: set[int] = set()
    names = log_names([entry.name.rpartition(":")[2] for entry in run.rewards], run.rewards)
    for index, entry in enumerate(run.rewards):
        if entry.name != "code_reward":
            continue
        name, column = names[index], entry.params.get("tests_column", "tests")
        asked = {column, ROW_REWARDS, *TEST_COLUMNS} & set(side.source.other_names)
        columns = {each: list(side.source.column(each)) for each in asked}
        rows = [(row, {each: values[row] for each, values in columns.items()}) for row in side.rows]
        rows = [(row, found) for row, found in rows if name in (names_in(found.get(ROW_REWARDS)) or [name])]
        reasons = find_row_faults((row, found.get(column), found) for row, found in rows)
        is_all = sum(map(len, reasons.values())) == len(rows)
        for (is_unread, reason), bad in sorted(reasons.items(), key=lambda one: -len(one[1])):
            why = reason.replace("they", "their tests", 1)
            found = f"{len(bad):,} of {len(rows):,} {kind} are not scored by {name}: {why}"
            fix = f"change or leave out these rows, or set rewards.{index}.params.tests_column to another column"
            level = "error" if is_unread or is_all else "warning"
            faults.append(Problem("data", found, fix, f"first: {side.source.where(bad[0])}", level))
            unscored.update(bad)
    return unscored


def find_judge_faults(run: RunConfig, row: dict[str, Any] | None) -> list[Problem]:
    """Problems of `eval.judge`: its column of references, its endpoint and template. `row`: held-out, None: unknown."""
    faults: list[Problem] = []
    with catching("judge", faults):
        if run.eval.judge is not None:
            judge, against = build_judge(run), run.eval.judge.against
            if row is not None and against != BASE and against not in row:
                raise ConfigError(NO_COLUMN.format(against, ", ".join(row)))
            _check_judge("eval.judge.params", judge, run, row)
    return faults


def _check_judge(key: str, judge: Any, run: RunConfig, row: dict[str, Any] | None) -> None:
    """Raise RewardError if `judge` is one that cannot be asked about a row of the data."""
    if isinstance(judge, Judge):
        columns = {} if row is None else _columns_of(run, [make_up(run, row, "", [])])
        asked = row and row | {name: values[0] for name, values in columns.items() if name not in CONVENTION}
        task = "Say hello." if row is None else task_text(row["prompt"], row)
        if fault := judge.find_fault(asked, task):
            raise RewardError(f"{key}: {fault}")


def _columns_of(run: RunConfig, completions: Sequence[Completion]) -> dict[str, list[Any]]:
    return make_columns(completions, has_thinking_budget(run.rloo), toolbox=None)


def _try_reward(
    run: RunConfig, reward: Any, name: str, made: dict[str, Completion], faults: list[Problem]
) -> list[float | None] | None:
    """A reward's values of all completions; None if it was not called, or, with a fault, cannot score all of them."""
    inner = getattr(reward, "reward", reward)
    if isinstance(inner, RewardModel) and (fault := find_model_fault(inner.model)):
        faults.append(Problem("rewards", f"{name}: {fault}"))
    is_left_out = isinstance(inner, RewardModel | EnvironmentReward) or hasattr(inner, "forward")
    if is_left_out or not callable(inner) or is_async(inner):
        return None  # it would load weights, it scores what has been played, or only a trainer can await it
    completions, row = list(made.values()), next(iter(made.values())).row
    if opens_thinking(row["prompt"]):
        parts = THINK_START, THOUGHT.strip(), THINK_END, "<answer>", str(row.get("answer")), "</answer>"
        ids = [completion.ids for completion in completions]
        completions += [make_up(run, row, gap.join(parts), own) for gap, own in zip(GAPS, ids, strict=False)]
    columns = _columns_of(run, completions)
    loggers: dict[str, Any] = {"log_extra": lambda name, values: None, "log_metric": lambda name, value: None}
    try:
        (scored,) = score([guard(reward, columns)], columns, trainer_state=None, **loggers)
    except RlooKitError as error:
        faults.append(Problem("rewards", f"{name}: {error}"))
        return None
    values, opened = scored.values[: len(made)], scored.values[len(made) :]
    failed = [(kind, problem) for kind, problem in zip(made, scored.problems, strict=False) if problem]
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
    return None if isinstance(inner, CodeReward) else values  # none of them is code


def _find_no_signal(scores: list[list[float | None] | None], weights: list[float], names: list[str]) -> list[Problem]:
    """A warning if rewards do not distinguish completions; none if those of one are not known."""
    # Not an error: the row may belong to no reward's task, and a reward of the user's may give all of these nothing.
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

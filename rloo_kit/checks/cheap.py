"""Call the rewards of a run before its model is loaded, on made-up completions of a row of its data."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.completion import Completion, Episode
from rloo_kit.config.model_names import SMOLLM2, smollm2_folder
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import has_thinking_budget
from rloo_kit.data.answers import GYM_REWARD, ROW_REWARDS, answer_reward_of, names_in
from rloo_kit.data.chat import check_budget, family_of, template_options
from rloo_kit.data.gym import require_library
from rloo_kit.data.light_tokenizer import LightTokenizer, embedded_tokenizer, read_tokenizer
from rloo_kit.data.load import needs_stack, prepare_data
from rloo_kit.data.worked import load_worked, worked_need_stack
from rloo_kit.errors import ConfigError, DataError, RewardError, RlooKitError
from rloo_kit.plan import parts
from rloo_kit.plan.parts import own_bytes
from rloo_kit.plan.planner import find_machine, find_machine_problem, read_workload
from rloo_kit.plan.shapes import find_in_cache, read_adapter
from rloo_kit.rewarding.code import CodeReward
from rloo_kit.rewarding.code_tests import TEST_COLUMNS, find_row_faults
from rloo_kit.rewarding.guard import guard, is_async, log_names, reward_name
from rloo_kit.rewarding.judge import BASE, NO_COLUMN, Judge, task_text
from rloo_kit.rewarding.math_answer import NEEDS_MATH_VERIFY
from rloo_kit.rewarding.registry import REGISTRY, build_judge, build_reward, check_reward_name
from rloo_kit.rewarding.score import make_columns, score
from rloo_kit.rewarding.scoring_model import RewardModel, find_model_fault
from rloo_kit.rewarding.signature import weighted_sum
from rloo_kit.rewarding.worker import close_worker
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.gpu import GIB
from rloo_kit.system.input_files import looked_for, places_of
from rloo_kit.system.problems import Problem, catching, errors_of, warn, warnings_of
from rloo_kit.system.processes import is_main_process
from rloo_kit.system.versions import check_trackers, is_importable
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
    """Problems of `run.rewards`: builds, calls and closes each reward; or of those that are already built, or made in
    Python.

    Args:
        tokenizer: None if it is not on this machine yet: then names are checked and the user's functions imported.
        row: a row of the training data with `prompt` (rendered), `answer` and the other columns; None if the data
            cannot be read: then nothing is called.
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


def find_tool_faults(run: RunConfig, tokenizer: Any | None, thinking: bool) -> list[Problem]:
    """Problems of `rloo.tools` and `rloo.environment`: imports them in their process, makes their schemas and, with a
    tokenizer, lets the chat template render them. Nothing is called."""
    faults: list[Problem] = []
    with catching("tools", faults):
        if open_toolbox(run) is not None and tokenizer is not None:
            ToolFormat(tokenizer, thinking, run.model.name, **template_options(run))
    longest, result = run.rloo.max_completion_length, run.rloo.tool_result_tokens
    if run.rloo.has_tools and result >= longest:
        found = f"rloo.tool_result_tokens is {result}, and a completion holds {longest} tokens, results included"
        fix = f"set rloo.tool_result_tokens={max(longest // 4, 1)} or a larger rloo.max_completion_length"
        faults.append(Problem("tools", found, fix, level="warning"))
    return faults


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


def _check_row_rewards(run: RunConfig, side: Any) -> None:
    """Refuse, with DataError, a row whose column `rewards` names none of the run's, or another one."""
    if ROW_REWARDS not in side.source.other_names:
        return
    names = log_names([entry.name.rpartition(":")[2] for entry in run.rewards], run.rewards)
    column = side.source.column(ROW_REWARDS)
    for row, named in ((row, names_in(column[row])) for row in side.rows):
        if named is not None and (not named or set(named) - set(names)):
            found = f"{side.source.where(row)}: the column {ROW_REWARDS} is {named}, and the run's rewards are "
            raise DataError(f"{found}{', '.join(names)}; name some of these, or leave it empty for all of them")


def _find_code_faults(run: RunConfig, side: Any, kind: str, faults: list[Problem]) -> set[int]:
    """Rows that `code_reward` cannot score; `kind` names them. An error if their tests have a form that it does not
    read, or if it can score no row; else a warning."""
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


def _find_judge_faults(run: RunConfig, row: dict[str, Any] | None) -> list[Problem]:
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
        asked = row and {name: values[0] for name, values in _columns_of(run, [make_up(run, row, "", [])]).items()}
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
    arguments: dict[str, Any] = {"trainer_state": None, "log_extra": lambda name, values: None}
    arguments["log_metric"] = lambda name, value: None
    try:
        (scored,) = score([guard(reward, columns)], columns, **arguments)
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


class PreflightError(RlooKitError, ValueError):
    """A run has problems that keep it from starting, listed in `faults`, warnings included. `found` completes the
    sentence "N problems, found ..."; the default is "before any weights were loaded"."""

    def __init__(self, faults: Sequence[Problem], found: str = ""):
        self.faults = tuple(faults)
        lines = [str(fault) for fault in errors_of(faults)]
        if len(lines) > 1 or found:
            count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
            lines.insert(0, f"{count}, found {found or 'before any weights were loaded'}")
        super().__init__("\n".join([*lines, *(f"warning: {fault}" for fault in warnings_of(faults))]))


def raise_errors(faults: Sequence[Problem]) -> None:
    """Raise PreflightError if one of the problems is an error; else print the warnings."""
    if errors_of(faults):
        raise PreflightError(faults)
    warn(faults)


@dataclass(frozen=True)
class FolderUse:
    """How the run's folder will be opened; see `RunDir.create`."""

    resume: bool = False
    overwrite: bool = False


def find_faults(run: RunConfig, tokenizer: Any | None = None, folder: FolderUse | None = None) -> list[Problem]:
    """Every problem of a run that can be found without its weights.

    Args:
        tokenizer: the policy's, if it is loaded. None looks for its files on this machine and skips what needs it if
            there are none. With a tokenizer, sources that need the stack are read too.
        folder: None skips the check that the run's folder is free.

    Returns:
        The problems in the order of the checks: machine, row, tools, data, rewards, folder, disk, trackers.
    """
    faults = find_machine_faults(run)
    loaded = tokenizer is not None
    with catching("row", faults):
        tokenizer = tokenizer or find_tokenizer(run)
    row, held_out, thinking = None, None, True
    if tokenizer is not None:
        with catching("row", faults):
            family, thinking = family_of(run, tokenizer)
            check_budget(run, family)
    unusable = errors_of(found := find_tool_faults(run, tokenizer, thinking))
    faults += found
    if tokenizer is not None and (loaded or not needs_stack(run)):
        plain = {"rloo": run.rloo.model_copy(update={"tools": [], "environment": None})} if unusable else {}
        with catching("data", faults):
            prepared = prepare_data(run.model_copy(update=plain), tokenizer)
            train, test = prepared.train, prepared.test
            row, held_out = (None, None) if unusable else (train.row(0), test.row(0) if test.rows else None)
            run.check_prompts(len(train.rows))
            _check_row_rewards(run, train)
            unscored = _find_code_faults(run, train, "rows", faults)
            _find_code_faults(run, test, "held-out rows", faults)
            if row is not None:  # the rewards are tried on one that can be scored
                row = train.row(next((index for index, one in enumerate(train.rows) if one not in unscored), 0))
    faults += find_reward_faults(run, tokenizer, thinking, row) + _find_judge_faults(run, held_out)
    names = [name for entry in run.rewards for name in dict.fromkeys((entry.name, entry.name.rpartition(":")[2]))]
    if not unusable and (toolbox := open_toolbox(run)) is not None and toolbox.owns_reward:
        names.append(str(toolbox.environment))
    known = ["auto", "accuracy", "reward", *names]
    if run.eval.every_steps and run.eval.measure not in known:
        level = "warning" if folder is None else "error"  # without a folder the rewards may be made in Python
        fix = f"set it to one of {', '.join(known)}"
        faults.append(Problem("rewards", f"eval.measure is {run.eval.measure}", fix, level=level))
    return faults + find_place_faults(run, folder)


def find_machine_faults(run: RunConfig) -> list[Problem]:
    """The first part of `find_faults`: the folders of model and adapter, and whether the model fits the machine."""
    faults: list[Problem] = []
    name, adapter = run.model.name, run.model.adapter
    is_path = not run.model.is_embedded and (name.startswith((".", "/", "~")) or name.count("/") > 1)
    with catching("machine", faults):
        for key, folder in (("model.name", name if is_path else None), ("model.adapter", adapter)):
            if folder is not None and not Path(folder).expanduser().is_dir():
                places = places_of(folder, key, run.source and run.source.parent)
                raise ConfigError(f"{key} is {folder}, and there is no such folder; {looked_for(places, key)}")
        if adapter is not None and not (Path(adapter).expanduser() / "adapter_config.json").is_file():
            inner = Path(adapter).expanduser() / "adapter"
            hint = f"; set model.adapter={inner}" if (inner / "adapter_config.json").is_file() else ""
            raise ConfigError(f"model.adapter is {adapter}, which holds no adapter_config.json{hint}")
    return [*faults, *filter(None, [find_machine_problem(run)])]


def find_place_faults(run: RunConfig, folder: FolderUse | None = None) -> list[Problem]:
    """The last part of `find_faults`: the run's folder, whether the checkpoints fit on its disk, the trackers."""
    faults: list[Problem] = []
    with catching("folder", faults):
        RunDir.check(run, resume=bool(folder and folder.resume), overwrite=folder is None or folder.overwrite)
    place = Path(run.folder).absolute()
    while not place.exists():
        place = place.parent
    free, kept = shutil.disk_usage(place).free, run.rloo.save_total_limit
    try:
        load = read_workload(run, find_machine(None))
        weights = own_bytes(load) or parts.FLOAT * parts.trained_weights(load)
        each = weights + parts.optimizer_bytes(load)
    except ConfigError:  # unknown shape
        each = 0
    # One is written before the oldest is deleted, and adapter/ is smaller than one.
    total = ((kept or 1) + 2) * each
    if total > free:
        what = f"{kept} checkpoints and the next one" if kept else "two checkpoints"
        fewer = "rloo.save_total_limit=1, " if kept is None or kept > 1 else ""
        found = f"{place} has {free / GIB:.2f} GiB free, but {what} and the adapter take {total / GIB:.2f}"
        fix = f"set {fewer}run.output_dir=... to a folder on a larger disk"
        faults.append(Problem("disk", found, fix, limit=f"{each / GIB:.2f} each, computed"))
    with catching("trackers", faults):
        check_trackers(run.rloo.report_to)
    return faults


def is_complete(run: RunConfig) -> bool:
    """Whether `find_faults` can check everything without the stack and without a download."""
    return not needs_stack(run) and find_tokenizer(run) is not None


def refuse_faults(run: RunConfig, tokenizer: Any | None = None, folder: FolderUse | None = None) -> None:
    """Raise PreflightError if `find_faults` finds an error; print warnings. With several processes only the main one
    checks. An unchanged run that has passed is not checked again."""
    state = f"{tokenizer is not None} {run.model_dump_json()}"
    if run._checked == state or not is_main_process():
        return
    raise_errors(find_faults(run, tokenizer, folder))
    run._checked = state


def refuse_worked_faults(run: RunConfig) -> None:
    """Raise PreflightError if the run or its demonstrations have problems that can be found without the weights. Prints
    warnings and what is left out.

    What only the stack can read (Parquet, a hub id, a tokenizer that is not on this machine) is left to `fine_tune`.
    """
    faults = find_faults(run, folder=FolderUse(overwrite=True))
    tokenizer = None
    with catching("row", []):  # `find_faults` reports it
        tokenizer = find_tokenizer(run)
    is_light = not worked_need_stack(run) and not needs_stack(run)
    if tokenizer is not None and is_light and not any(fault.name == "data" for fault in faults):
        with catching("data", faults):
            held_out = prepare_data(run, tokenizer).test
            load_worked(run, tokenizer, [held_out.texts[row] for row in held_out.rows])
    raise_errors(faults)


def find_tokenizer(run: RunConfig) -> LightTokenizer | None:
    """The tokenizer of the run's model from files on this machine, without transformers: the embedded model's, or that
    of a folder or of the Hugging Face cache. None if only transformers can load it, or if it has to be downloaded.
    Raises ConfigError if there is no such embedded model."""
    name = run.model.name
    if run.model.is_embedded:
        return embedded_tokenizer(name.removeprefix("embedded/"), run.model.vocabulary)
    folder = (smollm2_folder(name) if name in SMOLLM2 else Path(name)).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        base = read_adapter(folder).get("base_model_name_or_path")
        name, folder = (str(base), Path(str(base)).expanduser()) if base else (name, folder)
    if folder.is_dir():
        return read_tokenizer(folder)
    config = find_in_cache(name)
    return None if config is None else read_tokenizer(config.parent)

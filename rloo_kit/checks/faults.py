"""Every problem of a run that can be found without its weights."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit._stack import load_stack, setup_environment
from rloo_kit.checks.rewards import check_row_rewards, find_code_faults, find_judge_faults, find_reward_faults
from rloo_kit.config.model_names import EMBEDDED_PREFIX
from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import check_budget, family_of, template_options
from rloo_kit.data.load import Data, prepare_data
from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.plan import parts
from rloo_kit.plan.planner import find_machine, find_machine_problem, read_workload
from rloo_kit.results.samples import REFERENCE
from rloo_kit.runs.folder import RunDir
from rloo_kit.seams import part
from rloo_kit.system.gpu import GIB
from rloo_kit.system.input_files import looked_for, places_of
from rloo_kit.system.problems import Problem, catching, errors_of, raise_errors
from rloo_kit.system.processes import is_main_process
from rloo_kit.system.versions import check_trackers
from rloo_kit.tasks.worked import load_worked
from rloo_kit.tools.toolbox import open_toolbox
from rloo_kit.tools.turns import ToolFormat


@dataclass(frozen=True)
class FolderUse:
    """How the run's folder will be opened; see `RunDir.create`."""

    resume: bool = False
    overwrite: bool = False


def check(run: RunConfig, folder: FolderUse | None = None, worked: bool = False) -> Data | None:
    """Check a run before its weights are loaded, and print the warnings. With several processes only the main one does.

    Args:
        folder: how the run's folder will be opened; None skips the check that it is free.
        worked: check the demonstrations of `sft` too.

    Returns:
        The run's prompts for `load_data`, so that they are prepared once; None if they could not be read.

    Raises:
        ConfigError: keys that contradict each other, as `RunConfig.check`.
        PreflightError: lists all errors, each with its key.
    """
    run.check()
    if not is_main_process():
        return None
    faults, prepared = _examine(run, True, folder, worked)
    raise_errors(faults)
    return prepared


def find_faults(run: RunConfig, folder: FolderUse | None = None, prompts: bool = True) -> list[Problem]:
    """Every problem that `check` finds; without `prompts` and what is rendered of them, and so without the stack.
    `folder`: None skips the check that it is free."""
    return _examine(run, prompts, folder)[0]


def _examine(
    run: RunConfig, prompts: bool, folder: FolderUse | None = None, worked: bool = False
) -> tuple[list[Problem], Data | None]:
    """The problems, and the prompts; None if they could not be read or are not asked for, or there is no tokenizer."""
    faults, tokenizer = find_machine_faults(run), None
    if prompts:
        with catching("machine", faults):
            tokenizer = load_tokenizer(run)
    prepared, row, held_out, thinking = None, None, None, True
    if tokenizer is not None:
        with catching("row", faults):
            family, thinking = family_of(run, tokenizer)
            check_budget(run, family)
    unusable = errors_of(found := find_tool_faults(run, tokenizer, thinking))
    faults += found
    if tokenizer is not None:
        plain = {"rloo": run.rloo.model_copy(update={"tools": [], "environment": None})} if unusable else {}
        with catching("data", faults):
            prepared = prepare_data(run.model_copy(update=plain), tokenizer)
            train, test = prepared.train, prepared.test
            if run.rollout.engine == "server" and any(map(REFERENCE.search, train.texts)):
                text = "a prompt has an image, and rollout.engine is server, whose completions API takes none"
                faults.append(Problem("rollout", text, "set rollout.engine=generate or vllm"))
            row, held_out = (None, None) if unusable else (train.row(0), test.row(0) if test.rows else None)
            run.check_prompts(len(train.rows))
            check_row_rewards(run, train)
            unscored = find_code_faults(run, train, "rows", faults)
            find_code_faults(run, test, "held-out rows", faults)
            if row is not None:  # the rewards are tried on one that can be scored
                row = train.row(next((index for index, one in enumerate(train.rows) if one not in unscored), 0))
    faults += find_reward_faults(run, tokenizer, thinking, row) + find_judge_faults(run, held_out)
    names = [name for entry in run.rewards for name in dict.fromkeys((entry.name, entry.name.rpartition(":")[2]))]
    if not unusable and (toolbox := open_toolbox(run)) is not None and toolbox.owns_reward:
        names.append(str(toolbox.environment))
    known = ["auto", "accuracy", "reward", *names]
    if run.eval.every_steps and run.eval.measure not in known:
        level = "warning" if folder is None else "error"  # without a folder the rewards may be made in Python
        fix = f"set it to one of {', '.join(known)}"
        faults.append(Problem("rewards", f"eval.measure is {run.eval.measure}", fix, level=level))
    faults += find_place_faults(run, folder)
    if worked and prepared is not None and not any(one.name == "data" for one in faults):
        with catching("data", faults):
            load_worked(run, tokenizer, [prepared.test.texts[row] for row in prepared.test.rows])
    return faults, prepared


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


def find_tool_faults(run: RunConfig, tokenizer: Any | None, thinking: bool) -> list[Problem]:
    """Problems of `rloo.tools` and `rloo.environment`, which are imported and rendered, and not called."""
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
        weights = parts.own_bytes(load) or parts.FLOAT * parts.trained_weights(load)
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


def load_tokenizer(run: RunConfig) -> Any | None:
    """The policy's tokenizer without its model, downloaded if need be; None if it cannot be loaded, which
    `load_policy` reports. Raises ConfigError if there is no such embedded model."""
    setup_environment(run.model.backend)
    transformers = load_stack().transformers
    if run.model.is_embedded:
        from rloo_kit.demo.cold_start import build_tokenizer, image_ids

        tokenizer = build_tokenizer(run.model.name.removeprefix(EMBEDDED_PREFIX))
        if not image_ids(tokenizer):  # else the folder of the model, built if missing, says how images are read
            return tokenizer
    from rloo_kit.models.source import find_source

    with suppress(OSError, ValueError, BackendError):
        base = find_source(run).base
        return part("images").open_tokenizer(run, base, transformers.AutoTokenizer.from_pretrained(base))
    return None

"""Where a run resumes: at its newest intact checkpoint, unless the configuration or the processes have changed."""

from collections.abc import Collection
from contextlib import suppress

from rloo_kit.config.run import refuse_changes
from rloo_kit.errors import ConfigError, RunNotFoundError
from rloo_kit.runs.checkpoints import Checkpoint, find_whole, set_aside
from rloo_kit.runs.reader import RunReader
from rloo_kit.system.processes import count_processes, say


def find_place(run: RunReader, config: str, written: str, by_content: Collection[str]) -> Checkpoint | None:
    """The checkpoint to continue from, None for the start; damaged ones that are newer are set aside. `config` is the
    resolved configuration, `written` the same with absolute paths; files in the sections `by_content` are compared by
    what they contain. Raises RunNotFoundError if no checkpoint is intact or those that the run saved are gone,
    ConfigError if it would train differently."""
    folder, status = run.folder / "checkpoints", run.read_status()
    checkpoint, damaged = find_whole(folder, run.id)
    if checkpoint is None and damaged:
        reasons = "".join(f"\n  {path.name}: {damage}" for path, damage in damaged.items())
        raise RunNotFoundError(
            f"none of the checkpoints in {folder} is intact:{reasons}\nrestore one from a copy, or start over with "
            "--overwrite or run.name=..."
        )
    trained = status.get("step") or run.read_metrics()
    if checkpoint is None and (status.get("saved") or (trained and (run.folder / "adapter").exists())):
        raise RunNotFoundError(
            f"the run in {run.folder} has saved checkpoints, but there is no checkpoint in {folder}: restore them "
            "(is a disk not mounted?), or start over with --overwrite or run.name=..."
        )
    if checkpoint is None:  # nothing is trained yet
        with suppress(OSError, UnicodeDecodeError):
            began = (run.folder / "config.yaml").read_text(encoding="utf-8")
            refuse_changes(began, written, run.folder, by_content)
    else:
        refuse_changes(checkpoint.config, config, run.folder, by_content)
        before, now = checkpoint.processes, count_processes()
        if before != now:  # rollouts would have another size, and the position in the data would differ
            how = "without a launcher" if before == 1 else f"with as many (accelerate launch --num_processes {before})"
            raise ConfigError(
                f"the run in {run.folder} was trained in {before} process{'es' if before > 1 else ''} and would "
                f"continue in {now}: start it {how}, or start over with --overwrite or run.name=..."
            )
    for path, damage in damaged.items():
        number = path.name.rpartition("-")[2]
        if checkpoint and number.isdecimal() and int(number) > checkpoint.step:  # the run reaches that step again
            say(f"WARNING: {path} is not used: {damage}. It is kept as {set_aside(path).name}")
    return checkpoint

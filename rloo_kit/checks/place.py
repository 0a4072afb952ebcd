"""Whether a run has a place: its folder, room on the disk for its checkpoints, the libraries of its trackers."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan import parts
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.gpu import GIB
from rloo_kit.system.problems import Problem, catching
from rloo_kit.system.versions import check_trackers


@dataclass(frozen=True)
class FolderUse:
    """How the run's folder will be opened; see `RunDir.create`."""

    resume: bool = False
    overwrite: bool = False


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

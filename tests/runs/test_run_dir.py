"""A run's folder: refusals, atomic files, the lock, and what a resume may change."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rloo_kit.config.resume import changed_keys
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.runs.run_dir import RunDir

SECTIONS = {
    "run": {"seed": 0},
    "model": {"name": "m"},
    "data": {"source": "d"},
    "rewards": [{"name": "a", "weight": 1.0}],
    "rloo": {"max_steps": 10, "beta": 0.0, "save_steps": 5},
}


@dataclass
class Run:
    folder: Path
    sections: dict = field(default_factory=lambda: SECTIONS)

    def to_yaml(self):
        return json.dumps(self.sections)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "outputs" / "x")


def with_checkpoint(run, step, complete=True):
    folder = run.folder / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 1}' if complete else '{"global_st')
    return folder


def test_a_new_folder_records_what_the_run_is(run):
    """A result whose configuration and versions are not written beside it cannot be repeated."""
    with RunDir.create(run) as run_dir:
        assert run_dir.status()["state"] == "running"
    assert (run.folder / "config.yaml").read_text() == run.to_yaml()
    found = json.loads((run.folder / "versions.json").read_text())
    assert found["versions"]["python"].startswith("3.")
    assert set(found["git"]) == {"revision", "changed"}


@pytest.mark.parametrize("state", ["running", "finished", "interrupted", "failed"])
def test_a_run_that_is_there_is_refused(run, state):
    """Whatever state a run is in, only a flag may touch it."""
    with RunDir.create(run) as run_dir:
        run_dir.set_status(state, step=7)
    with pytest.raises(RunExistsError, match=f"{state} at step 7.*--resume.*--overwrite.*run.name=") as error:
        RunDir.create(run)
    assert isinstance(error.value, FileExistsError)


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(run):
    """A mistyped model name once had to be corrected twice: in the command, and with --overwrite."""
    with pytest.raises(ValueError, match="no such model"), RunDir.create(run):
        raise ValueError("no such model")
    with RunDir.create(run) as run_dir:
        assert run_dir.status()["state"] == "running"


def test_overwrite_deletes_the_run_and_nothing_else(run):
    """Notes that somebody keeps beside a run are not the kit's to delete."""
    with RunDir.create(run) as run_dir:
        run_dir.append_jsonl("metrics.jsonl", [{"step": 1}])
        run_dir.write_json("before.json", {})
    with_checkpoint(run, 3)
    (run.folder / "notes.txt").write_text("mine")
    with RunDir.create(run, overwrite=True) as run_dir:
        assert run_dir.read_jsonl("metrics.jsonl") == [] and run_dir.last_checkpoint() is None
        assert run_dir.read_json("before.json") is None
    assert (run.folder / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_no_run_is_not_written_into(run):
    """run.output_dir=/home with run.name=me would have made a home folder into a run's."""
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").write_text("...")
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(RunExistsError, match="not the folder of a run.*run.name="):
            RunDir.create(run, **flags)


def test_resume_needs_a_run(run):
    """A mistyped name with --resume would start from zero and look like going on."""
    with pytest.raises(RunNotFoundError, match="start it without --resume"):
        RunDir.create(run, resume=True)
    with pytest.raises(ConfigError, match="--resume and --overwrite"):
        RunDir.create(run, resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("rloo", {"beta": 0.1}, "rloo.beta: 0.0 then, 0.1 now"),
        ("rloo", {"max_steps": 9}, "rloo.max_steps: 10 then, 9 now"),
        ("model", {"name": "n"}, "model.name: 'm' then, 'n' now"),
        ("data", {"limit": 3}, "data.limit: None then, 3 now"),
        ("rloo", {"max_steps": 20, "save_steps": 1}, None),
        ("rloo", {"memory": "low", "tokens_per_pass": 100}, None),
        ("run", {"seed": 1, "name": "other"}, None),
    ],
)
def test_resume_refuses_what_would_train_something_else(run, section, change, message):
    """Two halves of two experiments under one name; more steps, or another way of printing, are no other experiment."""
    RunDir.create(run).close()
    run.sections = SECTIONS | {section: SECTIONS[section] | change}
    if message is None:
        RunDir.create(run, resume=True).close()
        return
    with pytest.raises(ConfigError, match=f"(?s){re.escape(message)}.*--overwrite"):
        RunDir.create(run, resume=True)


def test_keys_that_are_newer_than_the_run_are_no_difference(tmp_path):
    """After an update of the kit every run of before was refused, `rloo.delta: None then, ...`, for keys it had not."""
    from rloo_kit.config.resume import refuse_changes
    from rloo_kit.config.run import RunConfig

    now = RunConfig.model_validate(
        {"model": {"name": "m"}, "data": {"source": "a/b"}, "rewards": [{"name": "answer_reward"}],
         "rloo": {"max_steps": 3}}
    )  # fmt: skip
    lines = now.to_yaml().splitlines()
    first = lines.index("rollout:")
    older = [line for line in lines[:first] if "baseline" not in line and "memory" not in line]
    behind = next(place for place in range(first + 1, len(lines)) if not lines[place].startswith(" "))
    saved = tmp_path / "config.yaml"
    saved.write_text("\n".join(older + lines[behind:]))
    assert "rollout" not in saved.read_text() and "eval:" in saved.read_text()
    refuse_changes(saved, now.to_yaml())
    now.rollout.resample_rounds, now.rollout.engine = 2, "generate"
    with pytest.raises(ConfigError) as error:
        refuse_changes(saved, now.to_yaml())
    assert "rollout.resample_rounds: 0 then, 2 now" in str(error.value) and "engine" not in str(error.value)


def test_changed_rewards_are_named_by_their_place():
    """A list of rewards printed twice in full leaves finding the difference to the reader."""
    saved = {"rewards": [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 1.0}]}
    now = {"rewards": [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 2.0}, {"name": "c"}]}
    assert changed_keys(saved, now) == {"rewards.1.weight": (1.0, 2.0), "rewards.2.name": (None, "c")}


def test_two_processes_never_write_one_run(run):
    """Two jobs with one name, each truncating the other's metrics."""
    with RunDir.create(run):
        code = f"""
from tests.runs.test_run_dir import Run
from rloo_kit.runs.run_dir import RunDir
from pathlib import Path
try:
    RunDir.create(Run(Path({str(run.folder)!r})), resume=True)
except Exception as error:
    print(type(error).__name__, error)
"""
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
        assert "RunExistsError" in said and str(os.getpid()) in said and "run.name=" in said
    with RunDir.create(run, resume=True) as again:
        assert again.resumed


@pytest.mark.parametrize(("error", "state"), [(ValueError("bad"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_how_a_run_ended_is_recorded(run, error, state):
    """A run that died stays "running" for whoever polls its status."""
    with pytest.raises(type(error)), RunDir.create(run) as run_dir:
        run_dir.resume_command = "rloo-kit train x.yaml --resume"
        raise error
    status = RunDir(run.folder).status()
    assert status["state"] == state and status["error"] == f"{type(error).__name__}: {error}".removesuffix(": ")
    assert status["resume"] == "rloo-kit train x.yaml --resume"
    with RunDir.create(run, resume=True) as run_dir:
        assert "error" not in run_dir.status(), "what was wrong before is over"


def test_json_has_no_nan(run):
    """Python writes NaN, which no other reader of JSON takes."""
    with RunDir.create(run) as run_dir:
        run_dir.append_jsonl("metrics.jsonl", [{"step": 1, "kl": math.nan, "list": [math.inf, 1.0]}])
        text = (run.folder / "metrics.jsonl").read_text()
        assert text == '{"step": 1, "kl": null, "list": [null, 1.0]}\n'


def test_the_last_checkpoint_is_the_last_whole_one(run):
    """A machine that went off while a checkpoint was being written leaves a folder that cannot be loaded."""
    run_dir = RunDir(run.folder)
    assert run_dir.last_checkpoint() is None
    with_checkpoint(run, 9)
    whole = with_checkpoint(run, 10)
    with_checkpoint(run, 11, complete=False)
    (run.folder / "checkpoints" / "checkpoint-12").mkdir()
    assert run_dir.last_checkpoint() == (whole, 10), "10 comes after 9, and 11 and 12 are not whole"


def test_rewind_drops_what_will_be_done_again(run):
    """A resumed run whose metrics hold some steps twice draws a curve that goes back in time."""
    with RunDir.create(run) as run_dir:
        run_dir.append_jsonl("metrics.jsonl", [{"step": n} for n in (1, 2, 3)])
        run_dir.append_jsonl("rollouts.jsonl", [{"step": n} for n in (1, 1, 2, 2, 3, 3)])
        with open(run.folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "rew')  # cut off by a crash
        run_dir.rewind(2)
        assert (run.folder / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
        assert [row["step"] for row in run_dir.read_jsonl("rollouts.jsonl")] == [1, 1, 2, 2]
        run_dir.append_jsonl("metrics.jsonl", [{"step": 3}])
        assert [row["step"] for row in run_dir.read_jsonl("metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(("name", "reason"), [("a_file/x", "Not a directory"), ("y" * 300, "File name too long")])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name, reason):
    """A read-only disk, a file in the way or a name that is too long ended in a traceback of pathlib."""
    (tmp_path / "a_file").touch()
    with pytest.raises(SetupError, match=f"{re.escape(str(tmp_path / name))}.*{reason}.*run.output_dir=.*run.name="):
        RunDir.create(Run(tmp_path / name))

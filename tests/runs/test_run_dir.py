"""A run's folder: refusals, atomic files, the lock, and what a resume may change."""

import json
import os
import re
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rloo_kit.config.run import load_config
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.runs.checkpoints import MANIFEST, seal
from rloo_kit.runs.folder import RunDir
from rloo_kit.system.processes import count_processes

CHECKPOINT_FILES = (
    "adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth",
    "trainer_state.json", "loop_state.json",
)  # fmt: skip
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

    def with_absolute_files(self):
        return self


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "outputs" / "x")


def with_checkpoint(run, step, run_id=None):
    """A sealed checkpoint as training writes it, for the run in the folder unless another id is given."""
    folder = run.folder / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in CHECKPOINT_FILES:
        (folder / name).write_text(f'{{"global_step": {step}, "of": "{name}"}}')
    run_id = RunDir(run.folder).id if run_id is None else run_id
    seal(folder, step, run_id, run.to_yaml(), count_processes())
    return folder


def begin(run, step=0):
    """Start a run in its folder at `step`, with two earlier checkpoints if there is a step."""
    with RunDir.create(run) as run_dir:
        if step:
            for one in (step - 1, step):
                with_checkpoint(run, one)
                run_dir.append_jsonl("metrics.jsonl", [{"step": one, "run": run_dir.id}])
            run_dir.set_status("running", step=step)
    return run_dir


def contents(folder):
    return {
        str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size
    }


def test_a_new_folder_records_what_the_run_is(run):
    """A run that died stayed "running". Passwords were hidden in the command that made it, not in the one that
    resumes."""
    words = "rloo-kit train x.yaml rollout.server_url=http://me:s3cret@host:1"
    for error, state in ((KeyboardInterrupt(), "interrupted"), (ValueError("bad"), "failed")):
        with pytest.raises(type(error)), RunDir.create(run, overwrite=True) as run_dir:
            assert run_dir.status()["state"] == "running"
            run_dir.resume_command = f"{words} --resume"
            run_dir.set_status("running", command=words)
            raise error
        status = RunDir(run.folder).status()
        assert status["state"] == state and status["error"] == f"{type(error).__name__}: {error}".removesuffix(": ")
    assert status["resume"] == "rloo-kit train x.yaml rollout.server_url=http://(hidden) --resume"
    assert "s3cret" not in (run.folder / "status.json").read_text()
    text = (run.folder / "config.yaml").read_text()
    assert text.endswith(run.to_yaml()) and run_dir.id in text.splitlines()[0] and RunDir(run.folder).id == run_dir.id
    found = json.loads((run.folder / "versions.json").read_text())
    assert found["versions"]["python"].startswith("3.") and set(found["git"]) == {"revision", "changed"}
    with RunDir.create(run, resume=True) as run_dir:
        assert "error" not in run_dir.status(), "what was wrong before is over"


@pytest.mark.parametrize("left", ["", "checkpoints", "metrics", "rollouts"])
def test_what_a_run_has_trained_is_never_taken_without_a_flag(run, left):
    """A mistyped model name took --overwrite to fix; then the same command again deleted a run's checkpoints."""
    with RunDir.create(run) as run_dir:
        run_dir.set_status("failed", step=0)
        if left in ("metrics", "rollouts"):
            run_dir.append_jsonl(f"{left}.jsonl", [{"step": 1}])
    if left == "checkpoints":
        with_checkpoint(run, 5)
    before = contents(run.folder)
    if not left:
        return RunDir.create(run).close()
    with pytest.raises(FileExistsError, match="--resume.*--overwrite.*run.name="):
        RunDir.create(run)
    assert contents(run.folder) == before


def test_a_lost_status_is_read_from_the_newest_checkpoint(run):
    """An emptied status.json made the folder look free: a new start was accepted."""
    old = begin(run, step=6)
    for text in ("", '{"state": 3}'):
        (run.folder / "status.json").write_text(text)
        assert RunDir(run.folder).status() == {"run": old.id, "state": "interrupted", "step": 6}
        with pytest.raises(RunExistsError, match="interrupted at step 6"):
            RunDir.create(run)
    with RunDir.create(run, resume=True) as again:
        assert again.id == old.id and again.resumes_from.step == 6


def test_only_what_carries_the_runs_id_is_resumed(run):
    """A checkpoint that was copied in, or left by another run, is not this run's state."""
    old = begin(run, step=4)
    with_checkpoint(run, 9, run_id="0123456789ab")
    stray = run.folder / "checkpoints" / "checkpoint-99999"
    stray.mkdir()
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "run": "0123456789ab"}\n')
    with RunDir.create(run, resume=True) as run_dir:
        assert run_dir.id == old.id and run_dir.resumes_from.step == 4
        assert [row["step"] for row in run_dir.read_metrics()] == [3, 4]
    assert (run.folder / "checkpoints" / "damaged-9").is_dir() and not stray.exists()


@pytest.mark.parametrize("name", ["config.yaml", "versions.json", "status.json"])
@pytest.mark.parametrize("text", [None, "[1]", "\udcff"])
def test_a_run_with_a_damaged_file_is_resumed(run, name, text):
    """The checkpoints have everything a resume needs: the configuration, the number of processes and the id."""
    old = begin(run, step=4)
    (run.folder / name).unlink()
    if text is not None:
        (run.folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with RunDir.create(run, resume=True) as run_dir:
        assert run_dir.id == old.id and run_dir.resumes_from.step == 4
    run.sections = SECTIONS | {"rloo": SECTIONS["rloo"] | {"beta": 0.5}}
    with pytest.raises(ConfigError, match="(?s)rloo.beta: 0.0 then, 0.5 now.*--overwrite"):
        RunDir.create(run, resume=True)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


WAYS = {
    "truncated": truncate,
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": lambda path: path.unlink(),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "truncated") for name in CHECKPOINT_FILES), *((MANIFEST, way) for way in WAYS),
                      ("optimizer.pt", "zeroed"), ("optimizer.pt", "deleted"), ("optimizer.pt", "flipped")]
)  # fmt: skip
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(run, name, way, capsys):
    """Each ended in a traceback or went unnoticed: without its scheduler file a run continued at its peak rate."""
    begin(run, step=6)
    newest = run.folder / "checkpoints" / "checkpoint-6"
    WAYS[way](newest / name)
    with RunDir.create(run, resume=True) as run_dir:
        assert run_dir.resumes_from.step == 5 and run_dir.status()["step"] == 5
    printed = capsys.readouterr().out
    assert "checkpoint-6" in printed and name in printed and "damaged-6" in printed
    assert not newest.exists() and (run.folder / "checkpoints" / "damaged-6").is_dir()


def test_without_a_whole_checkpoint_nothing_is_started_over(run):
    """Restarting from step 0 under --resume drops a night of metrics; a folder named checkpoint-² was a traceback."""
    begin(run, step=6)
    (run.folder / "checkpoints" / "checkpoint-²").mkdir()
    for name in ("damaged-6", "damaged-6-2"):
        truncate(run.folder / "checkpoints" / "checkpoint-6" / "optimizer.pt")
        RunDir.create(run, resume=True).close()
        assert (run.folder / "checkpoints" / name).is_dir()
        with_checkpoint(run, 6)
    for step in (5, 6):
        truncate(run.folder / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt")
    before = contents(run.folder)
    with pytest.raises(RunNotFoundError, match="(?s)none of.*checkpoint-6: optimizer.pt has.*--overwrite"):
        RunDir.create(run, resume=True)
    assert contents(run.folder) == before


def test_overwrite_deletes_the_run_and_nothing_else(run, tmp_path):
    """The checkpoints/ of two runs were links to one large disk with other files, and --overwrite of one emptied it."""
    with RunDir.create(run) as first:
        first.append_jsonl("metrics.jsonl", [{"step": 1}])
        for name in ("before.json", "evaluations.jsonl", "best/evaluation.json"):
            (run.folder / name).parent.mkdir(exist_ok=True)
            first.write_json(name, {})
    with_checkpoint(run, 3)
    (run.folder / "notes.txt").write_text("mine")
    (run.folder / "checkpoints").rename(tmp_path / "large")
    (run.folder / "checkpoints").symlink_to(tmp_path / "large")
    with_checkpoint(run, 9, run_id="0123456789ab")
    (tmp_path / "large" / "thesis.tex").write_text("...")
    with RunDir.create(run, overwrite=True) as run_dir:
        assert run_dir.read_jsonl("metrics.jsonl") == [] and run_dir.last_checkpoint() is None
        assert not any((run_dir / name).exists() for name in ("before.json", "evaluations.jsonl", "best"))
        assert run_dir.id != first.id
    assert (run.folder / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "large").iterdir()) == ["checkpoint-9", "thesis.tex"]


def test_checkpoints_that_are_gone_are_not_an_empty_start(run, tmp_path):
    """With an unmounted disk, --resume emptied the metrics and completions and started at step 0."""
    begin(run, step=2)
    with RunDir.create(run, resume=True) as run_dir:
        run_dir.set_status("finished", saved=2)
    shutil.rmtree(run.folder / "checkpoints")
    (run.folder / "checkpoints").symlink_to(tmp_path / "not mounted")
    before = contents(run.folder)
    with pytest.raises(RunNotFoundError, match="no checkpoint in .*not mounted.*--overwrite"):
        RunDir.create(run, resume=True)
    assert contents(run.folder) == before


def test_an_adapter_that_is_a_link_is_refused(run, tmp_path):
    """A link at adapter/ was replaced by a folder, or ended the run when it saved its weights."""
    run.folder.mkdir(parents=True)
    (run.folder / "adapter").symlink_to(tmp_path / "not mounted")
    with pytest.raises(SetupError, match="adapter is a link.*run.output_dir"):
        RunDir.create(run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_not_hold_the_lock(run):
    """A data loader's worker outlived a killed run, and its folder was "being written by another process"."""
    reader, writer = os.pipe()
    begun, begins = os.pipe()
    run_dir = RunDir.create(run)
    child = os.fork()
    if child == 0:
        os.write(begins, b"x")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(begun, 1)  # it has let go of the lock by now
        run_dir.close()
        RunDir.create(run, resume=True).close()
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)


def test_overwrite_takes_only_a_folder_that_the_kit_marked(run):
    """run.output_dir=/home with run.name=me would have turned a home folder into a run's."""
    run.folder.mkdir(parents=True)
    (run.folder / ".config.yaml.4711.tmp").write_text("half of i")  # of a killed start, which neither flag accepted
    (run.folder / ".lock").touch()
    RunDir.check(run)
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "resnet.pt").write_text("weeks of work")
    for _ in range(2):
        before = contents(run.folder)
        for flags in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises((RunExistsError, RunNotFoundError), match="carries"):
                RunDir.create(run, **flags)
        assert contents(run.folder) == before
        (run.folder / "status.json").write_text('{"state": "finished"}')


def test_a_run_whose_folder_is_removed_ends(run):
    """Such a run trained for hours, ended with exit code 0 and had kept nothing."""
    lost = "was removed during the run, so training stops.*save_adapter.*run.output_dir"
    with pytest.raises(RunNotFoundError, match=lost), RunDir.create(run) as run_dir:
        shutil.rmtree(run.folder)
        run_dir.append_jsonl("metrics.jsonl", [{"step": 1}])
    assert not run.folder.exists()
    with pytest.raises(RunNotFoundError, match=lost), RunDir.create(run):
        shutil.rmtree(run.folder)  # in the middle of a save
        (run.folder / "checkpoints").mkdir()


def test_a_run_whose_place_was_taken_writes_no_more(run, monkeypatch):
    """A run's folder was moved away and another run started in its place: rows of the first went into its files."""
    with RunDir.create(run) as first:
        other = RunDir(run.folder)
        other.writes = False
        run.folder.rename(run.folder.with_name("moved"))
        with RunDir.create(run) as second:
            second.set_status("finished")
        before = contents(run.folder)
        with pytest.raises(RunNotFoundError, match="was removed during the run"):
            first.append_jsonl("metrics.jsonl", [{"step": 2}])
        monkeypatch.setattr("rloo_kit.runs.folder.SECONDS_FOR_MAIN", 0.0)
        with pytest.raises(RuntimeError), other:
            raise RuntimeError("gloo: connection closed")
    assert other.id == first.id and contents(run.folder) == before


def test_a_full_disk_is_said_in_a_line(run):
    """It ended in a traceback, and the status stayed "running". A test can set a limit on file size."""
    begin(run, step=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(SetupError, match="disk is full.*checkpoint of step 3.*free some space.*resume=True"):
        try:
            with RunDir.create(run, resume=True) as run_dir:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
                run_dir.append_jsonl("metrics.jsonl", [{"step": 1, "text": "x" * 5000}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert RunDir(run.folder).status()["state"] == "failed"


def test_a_run_is_written_by_one_at_a_time(run):
    """Two jobs with one name would truncate each other's metrics; a mistyped --resume would start from step 0."""
    with pytest.raises(RunNotFoundError, match="start it without --resume"):
        RunDir.create(run, resume=True)
    with pytest.raises(ConfigError, match="--resume and --overwrite"):
        RunDir.create(run, resume=True, overwrite=True)
    with RunDir.create(run), pytest.raises(RunExistsError, match=f"{os.getpid()}.*run.name="):
        RunDir.create(run, resume=True)
    with RunDir.create(run, resume=True) as again:
        assert again.resumed


@pytest.mark.parametrize(("name", "reason"), [("a_file/x", "Not a directory"), ("y" * 300, "File name too long")])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name, reason):
    """A read-only disk, a file in the way or a name that is too long ended in a pathlib traceback."""
    (tmp_path / "a_file").touch()
    with pytest.raises(SetupError, match=f"{re.escape(str(tmp_path / name))}.*{reason}.*run.output_dir=.*run.name="):
        RunDir.create(Run(tmp_path / name))


NEXT_TO_IT = """
model: {name: m}
data: {sources: [{source: task/rows.csv}, {source: openai/gsm8k}], test_size: 1}
rewards: [{name: "task/mine.py:right"}, {name: "own_reward:even"}, {name: answer_reward}]
rloo: {max_steps: 3}
run: {output_dir: outputs}
"""


def test_a_runs_config_finds_data_and_rewards_next_to_the_users_file(tmp_path, monkeypatch):
    """`train configs/smollm2_sums.yaml` found them; `export outputs/smollm2_sums` looked in the run's folder."""
    configs, own = tmp_path / "configs", tmp_path / "configs" / "own.yaml"
    (configs / "task").mkdir(parents=True)
    for name in ("task/rows.csv", "task/mine.py", "own_reward.py"):
        (configs / name).write_text("prompt,answer\n")
    own.write_text(NEXT_TO_IT)
    monkeypatch.chdir(tmp_path)
    with RunDir.create(load_config(own)) as run_dir:
        saved = load_config(run_dir.folder / "config.yaml")
    assert saved.data.all_sources == [str(configs / "task" / "rows.csv"), "openai/gsm8k"]
    assert [entry.name for entry in saved.rewards] == [
        f"{configs}/task/mine.py:right", f"{configs}/own_reward.py:even", "answer_reward"
    ]  # fmt: skip
    assert list(saved.reward_weights) == ["right", "even", "answer_reward"], "logged under the same names"
    RunDir.create(load_config(own), resume=True).close()
    monkeypatch.chdir(configs)  # found from here, so from here again, wherever the project is moved
    with RunDir.create(load_config(own)) as run_dir:
        assert load_config(run_dir.folder / "config.yaml").data.all_sources[0] == "task/rows.csv"


@pytest.mark.parametrize(("before", "now", "fix"), [(2, 1, "--num_processes 2"), (1, 2, "without a launcher")])
def test_a_run_goes_on_in_as_many_processes(run, monkeypatch, before, now, fix):
    """Four processes went on with a run of two: each rollout was twice as large, and half of the prompts came twice."""
    monkeypatch.setenv("WORLD_SIZE", str(before))
    begin(run, step=2)
    monkeypatch.setenv("WORLD_SIZE", str(now))
    with pytest.raises(ConfigError, match=f"trained in {before} process.*{fix}"):
        RunDir.create(run, resume=True)
    monkeypatch.setenv("WORLD_SIZE", str(before))
    RunDir.create(run, resume=True).close()

"""Batches without a kernel: the file, its names, what is refused, what resuming keeps, the comparison, exit codes.

Real papermill and kernels, and killing them, are in test_batch_ends.py and tests/notebooks/test_batch_runs.py.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from rloo_kit.batch.batch_file import Batch, load_batch
from rloo_kit.batch.runner import BatchRunner, open_batch
from rloo_kit.config.run import load_config
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError, SetupError
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.runs.files import write_json
from tests.evaluations import around
from tests.notebooks.batch_notebooks import write_notebook
from tests.test_cli import call

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "configs" / "batch_arithmetic.yaml"
PLAIN = "# Parameters\nseed = 0\nsize: int = 3\nlabel = 'a'\nfolder = str(1)\n"
TRAINS = "# Parameters\nseed = 0\nrun_name = ''\noutput_dir = 'outputs'\nresume = False\noverwrite = False\n"
KIT = (
    "# Parameters: plain values\nconfig = 'configs/arithmetic_thinking.yaml'\nnum_generations = 8\nseed = 0\n"
    "run_name = ''\noutput_dir = 'outputs'\noverrides = ''\n"
)
CODE = {"cell_type": "code", "source": "1/0", "metadata": {}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with one notebook of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write_notebook(tmp_path / "plain.ipynb", "print(seed)", parameters=PLAIN)
    write_notebook(tmp_path / "trains.ipynb", "print(seed)", parameters=TRAINS)
    write_notebook(tmp_path / "kit.ipynb", "kit.read_parameters(globals())", parameters=KIT)
    write_notebook(tmp_path / "bare.ipynb", "print(seed)", parameters=None)
    write_cells(tmp_path / "tags.ipynb", [CODE | {"metadata": {"tags": "parameters"}}])
    write_cells(tmp_path / "python.ipynb", [CODE | {"source": "a = 1\0", "metadata": {"tags": ["parameters"]}}])
    return tmp_path


def write_cells(path: Path, cells: object) -> None:
    path.write_text(json.dumps({"nbformat": 4, "cells": cells}))


def load(folder: Path, *overrides: str, **values: object) -> Batch:
    file = folder / "configs" / "b.yaml"
    content = {"notebook": "plain.ipynb", "output_dir": str(folder / "out")} | values
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_batch(file, *overrides)


def leave_batch(batch: Batch, *states: str) -> None:
    """The folder of a batch with these states."""
    for status, state in zip(open_batch(batch).values(), states, strict=True):
        status.state = state
        (batch.folder / status.name).mkdir()
        write_json(batch.folder / status.name / "status.json", asdict(status))


def to_do(batch: Batch, **flags: bool) -> list[str]:
    return [status.name for status in open_batch(batch, **flags).values() if status.state != "done"]


@pytest.mark.slow
def test_the_shipped_batch_is_what_its_header_says() -> None:
    """A grid that grows from six runs to eighteen under a header that still promises a quarter of an hour."""
    batch = load_batch(SHIPPED)
    assert f"= {len(batch.runs)} runs" in SHIPPED.read_text(encoding="utf-8")
    assert list(batch.runs)[1] == "arithmetic_thinking-num_generations=2-seed=1"
    assert {"run_name", "output_dir"} <= batch.notebook.declared.keys() and batch.notebook.reads_parameters


def test_grid_and_runs_lie_over_the_common_parameters(folder: Path) -> None:
    """Order and names decide a run's folder, and must not depend on anything else."""
    batch = load(folder, parameters={"seed": 7}, grid={"size": [1, 2], "label": ["x"]}, runs=[{"size": 9}, {}])
    assert list(batch.runs.items()) == [
        ("plain-size=1-label=x", {"seed": 7, "size": 1, "label": "x"}),
        ("plain-size=2-label=x", {"seed": 7, "size": 2, "label": "x"}),
        ("plain-size=9", {"seed": 7, "size": 9}),
        ("plain", {"seed": 7}),
    ]
    assert batch.notebook.declared == {"seed": 0, "size": 3, "label": "a", "folder": None}
    assert batch.folder == folder / "out" / "b"


def one(notebook: str = "plain.ipynb", **parameters: object) -> dict[str, object]:
    """A batch of a single run."""
    return {"notebook": notebook, "runs": [parameters]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outptu_dir": "x", "runs": [{}]}, "b.yaml:3: outptu_dir: unknown key"),
        ({"grid": {"seed": []}}, "grid.seed: is []; list should have at least 1 item"),
        ({"grid": {"seed": [1, math.inf]}}, "grid.seed.1: is inf; it takes text, finite numbers"),
        (one(seed={1: 2}), "runs.0.seed: is {1: 2}; it takes text"),
        ({}, "give a grid or runs"),
        ({"notebook": "nowhere.ipynb", "runs": [{}]}, "b.yaml: there is no file nowhere.ipynb; looked for"),
        ({"notebook": "nowhere.ipynb", "runs": [{}]}, "nowhere.ipynb; set notebook to its path"),
        ({"notebook": "configs/b.yaml", "runs": [{}]}, "b.yaml is not a notebook of format 4 (.ipynb)"),
        (one("tags.ipynb", seed=1), "tags.ipynb has no cell tagged parameters"),
        (one("python.ipynb"), "python.ipynb: the cell tagged parameters is not plain Python"),
        ({"name": "a/b", "runs": [{}]}, "name: is 'a/b'; string should match pattern"),
        ({"grid": {"seed": [0, 1]}, "runs": [{"seed": 0}]}, "two runs are plain-seed=0; remove one"),
        ({"runs": [{"seed": 0}, {}]}, "plain-seed=0 and plain are the same run; remove one"),
        ({"parameters": {"size": 1}, "grid": {"size": [3]}, "runs": [{"size": 3, "seed": 0}]}, "are the same run"),
        ({"grid": {"size": [1, 2, 3]}, "parameters": {"sied": 1}}, "plain-size=1: sied: plain.ipynb has"),
        (one(seeed=1), "plain-seeed=1: seeed: plain.ipynb has no such parameter; did you mean seed?"),
        (one("bare.ipynb", seed=1), "bare.ipynb has no cell tagged parameters, so it takes no parameters"),
        (one("trains.ipynb", output_dir="x"), "output_dir is set by the batch"),
        (one("kit.ipynb", temperature=0.5), 'overrides = "rloo.temperature=..."'),
        (one("kit.ipynb", num_generations=3), "whole groups of 3 (num_generations)"),
        (one("kit.ipynb", overrides="rewards.0.name=answer_rewrd"), "there is no reward 'answer_rewrd'"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(folder: Path, values: dict, message: str) -> None:
    """An ignored unknown key is a grid of one run, papermill only warns about a parameter that the notebook does not
    have, and a misspelt column failed all six runs, each after its model had been loaded: a lost night."""
    with pytest.raises(ConfigError) as caught:
        load(folder, **values)
    assert str(caught.value).count(message) == 1


@pytest.mark.slow
def test_overrides_and_another_kind_of_file(folder: Path) -> None:
    """A fault on the command line was reported as one in the file, and `rloo-kit train` on a batch file named twelve
    missing keys, but not the command to use."""
    with pytest.raises(ConfigError, match="^override grid=many: grid: is 'many'"):
        load(folder, "grid=many", runs=[{}])
    assert len(load(folder, "grid.seed=[4, 5]", grid={"seed": [1]}).runs) == 2
    assert load(folder, notebook="kit.ipynb", grid={"beta": [0.0, 0.1]}).runs["kit-beta=0.1"] == {"beta": 0.1}
    with pytest.raises(ConfigError, match=r"batch_arithmetic.yaml .* use: rloo-kit batch"):
        load_config(SHIPPED)
    with pytest.raises(ConfigError, match=r"use rloo-kit train"):
        load_batch(SHIPPED.with_name("arithmetic_thinking.yaml"))


@pytest.mark.slow
def test_a_config_next_to_the_file_is_found(folder: Path) -> None:
    """It is where its batch file is, as in the shipped configs/; a notebook looks only in the working folder."""
    text = (ROOT / "configs" / "arithmetic_thinking.yaml").read_text(encoding="utf-8")
    (folder / "configs" / "mine.yaml").write_text(text)
    runs = load(folder, notebook="kit.ipynb", runs=[{"config": "mine.yaml"}]).runs
    assert runs == {"kit-config=mine.yaml": {"config": str(folder / "configs" / "mine.yaml")}}
    (folder / "plain.yaml").write_text(text)
    write_notebook(folder / "plain.ipynb", "print(config)", parameters="# Parameters\nconfig = ''\n")
    assert list(load(folder, runs=[{"config": "plain.yaml"}]).runs.values()) == [{"config": "plain.yaml"}]


def test_resume_does_what_is_not_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose status says `running` has no kernel any more: its batch was killed."""
    states = ["done", "failed", "killed", "interrupted", "running", "waiting"]
    leave_batch(load(folder, grid={"seed": [1, 2, 3, 4, 5, 6]}), *states)
    more = load(folder, grid={"seed": [1, 2, 3, 4, 5, 6, 7]})
    assert to_do(more, resume=True) == [f"plain-seed={seed}" for seed in (2, 3, 4, 5, 6, 7)]
    found = open_batch(more, resume=True)["plain-seed=5"]
    assert found.state == "killed" and "SIGKILL" in str(found.error)
    fewer = load(folder, grid={"seed": [1]})
    BatchRunner(fewer, open_batch(fewer, resume=True), "").run()
    assert "0 runs to do, 1 done already" in capsys.readouterr().out


def test_a_run_that_has_changed_is_refused_by_name(folder: Path) -> None:
    """One table must not mix runs with the old and the new number of steps."""
    leave_batch(load(folder, grid={"seed": [1, 2]}, parameters={"size": 3}), "done", "failed")
    changed = load(folder, grid={"seed": [1, 2]}, parameters={"size": 4})
    with pytest.raises(ConfigError, match=r"plain-seed=1: size was 3, is 4\nplain-seed=2: size was 3, is 4\n.*--over"):
        open_batch(changed, resume=True)
    assert len(to_do(changed, overwrite=True)) == 2


def test_a_folder_of_something_else_is_refused(folder: Path) -> None:
    """A batch in a folder of results would delete them."""
    batch = load(folder, grid={"seed": [1]})
    with pytest.raises(RunNotFoundError, match="without --resume"):
        open_batch(batch, resume=True)
    with pytest.raises(ConfigError, match="--resume and --overwrite"):
        open_batch(batch, resume=True, overwrite=True)
    leave_batch(batch, "done")
    with pytest.raises(RunExistsError, match=r"\(1 done\).* --resume.* --overwrite.* name="):
        open_batch(batch)
    (folder / "out" / "other").mkdir()
    (folder / "out" / "other" / "results.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="not a batch's folder .* output_dir="):
        open_batch(load(folder, "name=other", grid={"seed": [1]}))


def test_a_folder_that_cannot_be_written_names_the_key(folder: Path) -> None:
    """A full or read-only disk ended in a bare "Not a directory"; what to set was left to guess."""
    (folder / "out").write_text("a file")
    with pytest.raises(
        SetupError, match=r"cannot be written: .*; choose another place with output_dir=\.\.\. or .*name="
    ):
        open_batch(load(folder, grid={"seed": [1]}))


def test_overwrite_deletes_what_a_batch_wrote_and_nothing_else(folder: Path) -> None:
    """--overwrite must not be `rm -rf`: notes that a user keeps next to the runs, or in a run's folder, stay."""
    batch = load(folder, grid={"seed": [1, 2]})
    leave_batch(batch, "done", "failed")
    (batch.folder / "comparison.html").write_text("old")
    (batch.folder / "notes.txt").write_text("mine")
    (batch.folder / "plain-seed=1" / "run" / "checkpoints").mkdir(parents=True)
    (batch.folder / "plain-seed=2" / "notes.txt").write_text("mine")
    (batch.folder / "own").mkdir()
    (batch.folder / "own" / "status.json").write_text('{"state": "finished", "step": 60}')  # a training run's
    open_batch(batch, overwrite=True)
    left = sorted(str(path.relative_to(batch.folder)) for path in batch.folder.rglob("*") if path.is_file())
    assert left == ["notes.txt", "own/status.json", "plain-seed=2/notes.txt"]
    assert not (batch.folder / "plain-seed=1").exists()


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"name": "x", "notebook": "y", "state": "dead"}'])
def test_a_damaged_file_counts_as_none(content: str, folder: Path) -> None:
    """A truncated status.json of one run ended `--resume` of the other runs."""
    batch = load(folder, grid={"seed": [1, 2]})
    leave_batch(batch, "done", "done")
    (batch.folder / "plain-seed=1" / "status.json").write_text(content)
    assert to_do(batch, resume=True) == ["plain-seed=1"]


@pytest.fixture
def compared(folder: Path) -> BatchRunner:
    """Two finished runs, one that failed, one waiting."""
    batch = load(folder, notebook="trains.ipynb", grid={"seed": [1, 2, 3, 4]})
    leave_batch(batch, "done", "done", "failed", "waiting")
    for seed, right in ((1, 0.25), (2, 0.75)):
        write_trained(batch.folder / f"trains-seed={seed}" / "run", seed, right)
    return BatchRunner(batch, open_batch(batch, resume=True), "again")


def write_trained(folder: Path, seed: int, right: float) -> None:
    """The folder of a training run that has finished."""
    run = load_config(ROOT / "configs" / "arithmetic_thinking.yaml", f"run.seed={seed}")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(run.to_yaml())
    (folder / "status.json").write_text('{"state": "finished", "step": 2, "max_steps": 2, "seconds": 75.0}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.625}\n')
    for name, accuracy in (("before", 0.2), ("after", right)):
        found = Evaluation(name, 100, 1, 1.0, 48, {"accuracy": around(accuracy)}, prompts_digest="same")
        (folder / f"{name}.json").write_text(json.dumps(found.to_dict()))


def test_the_runs_that_are_done_are_compared(compared: BatchRunner, capsys: pytest.CaptureFixture[str]) -> None:
    compared.signals.append("Ctrl-C")  # nothing is to start
    assert compared.run() == (2, True)
    printed = capsys.readouterr().out
    assert "seed=2 is ahead of seed=1: accuracy +50 points" in " ".join(printed.split())
    assert "2 done, 1 failed, 1 waiting; to go on: again" in printed
    assert "seed=2 is ahead of seed=1" in (compared.batch.folder / "comparison.html").read_text(encoding="utf-8")


def test_a_damaged_run_does_not_end_the_batch(compared: BatchRunner, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation whose accuracy is a text ended the batch with the runs that were still to do."""
    (compared.batch.folder / "trains-seed=2" / "run" / "config.yaml").write_text("model: [")
    compared.signals.append("Ctrl-C")
    compared.run()
    assert not (compared.batch.folder / "comparison.html").exists()
    assert "the comparison could not be written: ConfigError" in capsys.readouterr().out


def test_refusals_have_an_exit_code_of_their_own(folder: Path) -> None:
    """With 2 for a refusal, a script would take a mistyped option for two failed runs and resume forever."""
    batch = load(folder, grid={"seed": [1]})
    file = folder / "configs" / "b.yaml"
    for words, message in (
        (["nowhere.yaml"], "nowhere.yaml"),
        ([file, "parameters.sied=1"], "sied: plain.ipynb"),
        ([file, "--resume"], "without --resume"),
        ([file, "--quick"], "--quick"),
        ([], "FILE"),
    ):
        code, printed, said = call("batch", *words)
        assert code == 125 and message in said and printed == "" and "Traceback" not in said
    assert not batch.folder.exists(), "nothing was started, nothing is left"


@pytest.mark.parametrize(("not_done", "code"), [(0, 0), (2, 2), (130, 100)])
def test_the_exit_code_counts_the_runs_that_are_not_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, not_done: int, code: int
) -> None:
    """An exit code is taken modulo 256: 256 failed runs must not look like success."""
    load(folder, grid={"seed": [1]})
    words = ("batch", folder / "configs" / "b.yaml")
    for interrupted in (False, True):
        monkeypatch.setattr("rloo_kit.batch.runner.run_batch", lambda *_, **__: (not_done, interrupted))  # noqa: B023
        assert call(*words)[0] == (130 if interrupted else code)
    monkeypatch.setattr("rloo_kit.batch.runner.run_batch", lambda *_, **__: Path("/nowhere/at/all").read_text())
    found, _, said = call(*words)
    assert found == 125 and "/nowhere" in said, "Python ends with 1 on a bug, which would read as one failed run"

"""Batches without a kernel: the file, its names, what is refused, what resuming keeps, the comparison, exit codes.

Real papermill processes, and killing them, are in tests/notebooks/test_batch_runs.py.
"""

import csv
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from rloo_kit.cli import app
from rloo_kit.config.run import load_config
from rloo_kit.errors import ConfigError, RunExistsError, RunNotFoundError
from rloo_kit.notebook.batch import Batch, BatchRun, Notebook, load_batch
from rloo_kit.notebook.batch_folder import (
    BatchDir,
    RunStatus,
    collect_rows,
    make_text_table,
    write_comparison,
)
from rloo_kit.notebook.batch_run import BatchResult, Runner, RunProcess, papermill_command
from rloo_kit.notebook.papermill import GIVEN_OUT, choose_ports
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.intervals import Measured
from rloo_kit.system.console import render_text
from tests.evaluations import around
from tests.notebooks.batch_notebooks import wait_for, write_notebook

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
    file.write_text(
        yaml.safe_dump({"notebook": "plain.ipynb", "output_dir": str(folder / "out")} | values, sort_keys=False)
    )
    return load_batch(file, *overrides)


def leave_batch(batch: Batch, *states: str) -> None:
    """The folder of a finished batch with these states."""
    with BatchDir.create(batch) as place:
        for status, state in zip(place.statuses.values(), states, strict=True):
            status.state = state
            place.save(status)
        place.save_batch("finished", "rloo-kit batch runs.yaml --resume")


# ------------------------------------------------------------------------------------------------ the file


@pytest.mark.slow
def test_the_shipped_batch_is_what_its_header_says() -> None:
    """A grid that grows from six runs to eighteen under a header that still promises a quarter of an hour."""
    batch = load_batch(SHIPPED)
    assert f"= {len(batch.runs)} runs" in SHIPPED.read_text(encoding="utf-8")
    assert batch.varying() == ["num_generations", "seed"]
    assert batch.runs[0].notebook.trains and batch.runs[0].notebook.reads_parameters


def test_grid_and_runs_lie_over_the_common_parameters(folder: Path) -> None:
    """Order and names decide a run's folder, and must not depend on anything else."""
    runs = [{"parameters": {"size": 9}}, {"name": "mine", "notebook": "trains.ipynb", "timeout_s": 5}]
    batch = load(folder, parameters={"seed": 7}, grid={"size": [1, 2], "label": ["x"]}, runs=runs, timeout_s=60)
    assert [(run.name, run.parameters, run.timeout_s) for run in batch.runs] == [
        ("plain-size=1-label=x", {"seed": 7, "size": 1, "label": "x"}, 60),
        ("plain-size=2-label=x", {"seed": 7, "size": 2, "label": "x"}, 60),
        ("plain-size=9", {"seed": 7, "size": 9}, 60),
        ("mine", {"seed": 7}, 5),
    ]
    assert batch.runs[0].resolved == {"seed": 7, "size": 1, "label": "x", "folder": None}
    assert batch.varying() == ["size", "label"] and batch.folder == folder / "out" / "b"


def test_the_resolved_file_is_the_same_batch(folder: Path) -> None:
    """batch.yaml may be sent to a colleague, and has to give the same runs with the same names."""
    batch = load(folder, grid={"size": [1e-6, 2], "label": ["no", "1"]}, timeout_s=30, jobs=2)
    (folder / "again.yaml").write_text(batch.to_yaml())
    again = load_batch(folder / "again.yaml")
    assert again.runs == batch.runs and (again.folder, again.jobs) == (batch.folder, 2)


def one(notebook: str = "plain.ipynb", **parameters: object) -> dict[str, object]:
    """A batch of a single run."""
    return {"notebook": notebook, "runs": [{"parameters": parameters}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"runs": [{"paramters": {}}]}, "runs.0.paramters: unknown key; did you mean runs.0.parameters?"),
        ({"jbos": 2, "runs": [{}]}, "b.yaml:3: jbos: unknown key"),
        ({"grid": {"seed": []}}, "grid.seed: is []; it takes a list"),
        ({"grid": {"seed": [1, math.inf]}}, "grid.seed: is [1, inf]; it takes text, finite numbers"),
        (one(seed={1: 2}), "runs.0.parameters.seed: is {1: 2}; it takes text"),
        ({}, "give a grid or runs"),
        ({"grid": {f"p{n}": list(range(9)) for n in range(9)}}, "387,420,489 runs; a batch has at most 1,000"),
        ({"runs": [{}], "jobs": 0}, "jobs: is 0; input should be greater than or equal to 1"),
        ({"runs": [{"notebook": "nowhere.ipynb"}]}, "runs.0.notebook: there is no file nowhere.ipynb; looked for"),
        ({"notebook": "configs/b.yaml", "runs": [{}]}, "b.yaml is not a notebook of format 4 (.ipynb)"),
        (one("tags.ipynb"), "tags.ipynb is not a notebook of format 4 (.ipynb): cells.0.metadata.tags: "),
        (one("python.ipynb"), "python.ipynb: the cell tagged parameters is not plain Python"),
        ({"notebook": None, "grid": {"seed": [1]}}, "notebook: missing"),
        ({"runs": [{"name": "../up"}]}, "runs.0.name: is '../up'; it becomes a folder"),
        ({"name": "a/b", "runs": [{}]}, "name: is 'a/b'; it becomes a folder"),
        ({"grid": {"seed": [0, 1]}, "runs": [{"name": "base"}]}, "plain-seed=0 and base are the same run"),
        (
            {"runs": [{"name": "A", "parameters": {"seed": 1}}, {"name": "a", "parameters": {"seed": 2}}]},
            "two runs are called a; give one another name (runs.N.name)",
        ),
        ({"grid": {"size": [1, 2, 3]}, "parameters": {"sied": 1}}, "plain-size=1 (and 2 more): sied: plain.ipynb has"),
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
    with pytest.raises(ConfigError, match="^override jobs=many: jobs: is 'many'"):
        load(folder, "jobs=many", runs=[{}])
    assert load(folder, "grid.seed=[4, 5]", "jobs=3", grid={"seed": [1]}).jobs == 3
    assert load(folder, notebook="kit.ipynb", grid={"beta": [0.0, 0.1]}).runs[1].parameters == {"beta": 0.1}
    with pytest.raises(ConfigError, match=r"batch_arithmetic.yaml .* use: rloo-kit batch"):
        load_config(SHIPPED)
    with pytest.raises(ConfigError, match=r"use rloo-kit train"):
        load_batch(SHIPPED.with_name("arithmetic_thinking.yaml"))


# ------------------------------------------------------------------------------------------------ papermill


def test_papermill_reads_the_parameters_as_they_were_meant(tmp_path: Path) -> None:
    """papermill reads YAML 1.1, where 1e-06 is a string and `no` is False."""
    from papermill.iorw import read_yaml_file

    given = {"a": 1e-6, "b": "1e-6", "c": "no", "d": True, "e": None, "f": 2e-3, "g": "true", "h": [1, 2], "i": "ü: #"}
    command = papermill_command(Path("/x/{odd}.ipynb"), tmp_path, given)
    read = read_yaml_file(str(tmp_path / "parameters.yaml"))
    assert read == given and [type(value) for value in read.values()] == [type(value) for value in given.values()]
    assert command[3] == "/x/{{odd}}.ipynb", "papermill fills in what stands in braces"
    assert command[:3] == [sys.executable, "-m", "rloo_kit.notebook.papermill"]


def test_a_kernels_ports_are_free_and_outside_the_systems_own_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A port that the system may give to any connection was taken when the kernel began to listen."""
    ports = choose_ports(5)
    assert len(set(ports)) == 5 and max(ports) < int(GIVEN_OUT.read_text().split()[0])
    monkeypatch.setattr("rloo_kit.notebook.papermill.GIVEN_OUT", tmp_path / "range")
    monkeypatch.setattr("rloo_kit.notebook.papermill.FIRST_PORT", ports[0])
    (tmp_path / "range").write_text(f"{ports[0] + 1}\t60999\n")
    assert choose_ports(5) == [ports[0]]
    with socket.socket() as held:
        held.bind(("127.0.0.1", ports[0]))
        assert choose_ports(5) == [], "what is taken is not offered; Jupyter chooses what is missing"


def start_python(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunProcess:
    """A program in papermill's place."""
    monkeypatch.setattr("rloo_kit.notebook.batch_run.papermill_command", lambda *_: [sys.executable, "-c", code])
    run = BatchRun("x", Notebook(folder / "x.ipynb", None, {}, False), {})
    return RunProcess(run, folder, {}, "id-3")


def test_papermill_that_goes_on_without_its_kernel_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of papermill wait forever for a killed kernel, and the batch with them."""
    monkeypatch.setattr("rloo_kit.notebook.batch_run.KERNEL_GONE_S", 0.1)
    code = (
        "import subprocess, sys, time\n"
        "kernel = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "time.sleep(300)"
    )
    process = start_python(code, tmp_path, monkeypatch)
    try:
        assert not process.hangs(), "a kernel that has not started yet is not gone"
        children = wait_for(psutil.Process(process.pid).children, "a kernel")
        time.sleep(0.2)
        assert not process.hangs()
        children[0].kill()
        wait_for(process.hangs, "it hangs")
    finally:
        process.end()


def test_a_batch_in_a_notebook_does_not_pass_that_notebook_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the JPY_SESSION_NAME of the surrounding notebook, a run's last cell would take its kernel for one of a
    Jupyter server."""
    monkeypatch.setenv("JPY_SESSION_NAME", "mine.ipynb")
    code = "import os; print(sorted(name for name in os.environ if name[:3] in ('JPY', 'RLO')))"
    process = start_python(code, tmp_path, monkeypatch)
    wait_for(lambda: process.poll() is not None, "it ends")
    assert process.last_line() == "['RLOO_KIT_BATCH', 'RLOO_KIT_BATCH_RUN']"


# ------------------------------------------------------------------------------------------------ the folder


def test_resume_does_what_is_not_done(folder: Path) -> None:
    """A run whose status says `running` has no process any more if the folder's lock is free."""
    states = ["done", "failed", "killed", "interrupted", "running", "waiting"]
    batch = load(folder, grid={"seed": [1, 2, 3, 4, 5, 6]})
    leave_batch(batch, *states)
    more = load(folder, grid={"seed": [1, 2, 3, 4, 5, 6, 7]})
    with BatchDir.create(more, resume=True) as place:
        assert [run.parameters["seed"] for run in place.to_do()] == [2, 3, 4, 5, 6, 7]
        found = place.statuses["plain-seed=5"]
        assert found.state == "killed" and "SIGKILL" in str(found.error)
    fewer = load(folder, grid={"seed": [1, 2]})
    with BatchDir.create(fewer, resume=True) as place:
        assert place.left == [f"plain-seed={seed}" for seed in (3, 4, 5, 6)]


def test_a_run_that_has_changed_is_refused_by_name(folder: Path) -> None:
    """One table must not mix runs with the old and the new number of steps."""
    leave_batch(load(folder, grid={"seed": [1, 2]}, parameters={"size": 3}), "done", "failed")
    changed = load(folder, grid={"seed": [1, 2]}, parameters={"size": 4})
    with pytest.raises(ConfigError, match=r"plain-seed=1: size was 3, is 4\nplain-seed=2: size was 3, is 4\n.*--over"):
        BatchDir.create(changed, resume=True)
    with BatchDir.create(changed, overwrite=True) as place:
        assert len(place.to_do()) == 2


def test_a_folder_in_use_or_of_something_else_is_refused(folder: Path) -> None:
    """Two batches in one folder would overwrite each other's statuses; a batch in a folder of results would delete
    them."""
    batch = load(folder, grid={"seed": [1]})
    with pytest.raises(RunNotFoundError, match="without --resume"):
        BatchDir.create(batch, resume=True)
    with pytest.raises(ConfigError, match="--resume and --overwrite"):
        BatchDir.create(batch, resume=True, overwrite=True)
    leave_batch(batch, "done")
    with pytest.raises(RunExistsError, match=r"\(finished\).* --resume.* --overwrite.* name="):
        BatchDir.create(batch)
    with BatchDir.create(batch, resume=True), pytest.raises(RunExistsError, match="another process .* name="):
        BatchDir.create(batch, resume=True)
    (folder / "out" / "other").mkdir()
    (folder / "out" / "other" / "results.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="no batch.json.* output_dir="):
        BatchDir.create(load(folder, "name=other", grid={"seed": [1]}))


def test_overwrite_deletes_what_a_batch_wrote_and_nothing_else(folder: Path) -> None:
    """--overwrite must not be `rm -rf`: notes that a user keeps next to the runs stay."""
    batch = load(folder, grid={"seed": [1, 2]})
    leave_batch(batch, "done", "failed")
    place = batch.folder
    (place / "notes.txt").write_text("mine")
    (place / "plain-seed=1" / "run" / "checkpoints").mkdir(parents=True)
    (place / "plain-seed=2" / "notes.txt").write_text("mine")
    (place / "own").mkdir()
    (place / "own" / "status.json").write_text('{"state": "finished", "step": 60}')  # a training run, not a batch's
    BatchDir.create(batch, overwrite=True).close()
    left = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and path.name != ".lock")
    assert left == ["batch.yaml", "notes.txt", "own/status.json", "plain-seed=2/notes.txt"]


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"name": "x", "notebook": "y", "state": "dead"}'])
def test_a_damaged_file_counts_as_none(content: str, folder: Path) -> None:
    """A truncated status.json of one run, a batch.json that is a list, or `"accuracy": "high"` ended `--resume` of the
    other runs."""
    batch = load(folder, grid={"seed": [1, 2]})
    leave_batch(batch, "done", "done")
    (batch.folder / batch.runs[0].name / "status.json").write_text(content)
    training = batch.folder / batch.runs[1].name / "run"
    training.mkdir()
    (training / "after.json").write_text('{"accuracy": "high", "low": [], "greedy_accuracy": NaN, "mean_tokens": true}')
    with BatchDir.create(batch, resume=True) as place:
        assert [run.name for run in place.to_do()] == [batch.runs[0].name]
        assert collect_rows(place)[1]["accuracy_after"] is collect_rows(place)[1]["tokens_after"] is None
    (batch.folder / "batch.json").write_text(content if '"state"' not in content else "[2]")
    with pytest.raises(RunNotFoundError, match="no batch to resume"):
        BatchDir.create(batch, resume=True)


# ------------------------------------------------------------------------------------------------ the comparison


def evaluation(accuracy: float, thinking: float) -> dict:
    found = Evaluation("x", 50, 1, 1.0, 48, {"accuracy": around(accuracy), "greedy_accuracy": around(accuracy)})
    found.measures["thinking_tokens"], found.closed_share = Measured(thinking, thinking - 1, thinking + 1, 50), 0.5
    return found.to_dict()


@pytest.fixture
def compared(folder: Path) -> BatchDir:
    """Two finished runs, one that failed with a hostile error text, one waiting."""
    batch = load(folder, notebook="trains.ipynb", grid={"seed": [1, 2, 3, 4]})
    with BatchDir.create(batch) as place:
        for status, accuracy in zip(list(place.statuses.values())[:2], (0.25, 0.75), strict=True):
            status.state, status.seconds, status.attempts = "done", 75.0, 1
            training = place.training(status.name).folder
            training.mkdir(parents=True)
            (training / "before.json").write_text(json.dumps(evaluation(0.2, 10.0)))
            (training / "after.json").write_text(json.dumps(evaluation(accuracy, 20.0)))
            (training / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.625}\n')
            (training / "status.json").write_text('{"state": "finished", "step": 2, "verdict": {"kind": "learnt"}}')
        (training / "report.html").write_text("the second one's")
        failed = list(place.statuses.values())[2]
        failed.state, failed.attempts = "failed", 1
        failed.error = "cell [3]: ValueError: <script>alert(1)</script> & \x1b[31m\nsecond line"
        return place


def test_the_comparison_holds_every_figure_of_every_run(compared: BatchDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that reads the wrong file would show the figures before training as those after."""
    monkeypatch.setenv("COLUMNS", "120")
    rows = collect_rows(compared)
    assert [row["parameters.seed"] for row in rows] == [1, 2, 3, 4]
    second = {"accuracy_before": 0.2, "accuracy_after": 0.75, "steps": 2, "reward_last": 0.625, "verdict": "learnt"}
    assert second.items() <= rows[1].items()
    assert math.isclose(rows[1]["accuracy_low_after"], 0.65) and rows[1]["thinking_tokens_after"] == 20.0
    assert rows[3]["state"] == "waiting" and rows[3]["accuracy_after"] is None
    page, table = write_comparison(compared)
    read = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [row["accuracy_after"] for row in read] == ["0.25", "0.75", "", ""] and read[2]["state"] == "failed"
    text = render_text(make_text_table(compared))
    assert "0.200 → 0.750" in text and "[0.650, 0.850]" in text and "10.0 → 20.0" in text and "1:15" in text
    html = page.read_text(encoding="utf-8")
    assert re.search(r">0\.750</span>\s*<span class=\"under\">\[0\.650, 0\.850\]", html)
    assert "4 runs: 1 waiting, 2 done, 1 failed; 2 min 30 s" in html
    assert html.count('<span class="right">learnt</span>') == 2
    assert 'href="trains-seed=2/run/report.html"' in html, "a report, where there is one, and no raw notebook"
    assert 'href="trains-seed=1/notebook.ipynb"' in html and "trains-seed=2/notebook.ipynb" not in html
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; ␛[31m" in html
    assert 'href="trains-seed=3/log.txt"' in html


@pytest.mark.slow
def test_a_screen_that_is_gone_ends_the_printing_and_not_the_batch(folder: Path) -> None:
    """With `rloo-kit batch ... | head` or a closed terminal, the first line that could not be written ended the
    batch."""
    load(folder, grid={"seed": [1]})
    code = f"""
from rloo_kit.notebook.batch import load_batch
from rloo_kit.notebook.batch_run import Runner
from rloo_kit.notebook.batch_folder import BatchDir
with BatchDir.create(load_batch({str(folder / "configs" / "b.yaml")!r})) as place:
    for text in ("nobody reads this", "nor this"):
        Runner(place, [], "").print(text)
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def measure_again(place: BatchDir, values: dict[str, float], rewards: list[float]) -> None:
    """Give the two finished runs a reward before and after that leads, and further measures."""
    for status in list(place.statuses.values())[:2]:
        for name, reward in zip(("before", "after"), rewards, strict=True):
            file = place.training(status.name).folder / f"{name}.json"
            found = Evaluation.read(file)
            found.judged_by = "exact match"
            found.measures |= {key: around(value) for key, value in (values | {"reward": reward}).items()}
            file.write_text(json.dumps(found.to_dict()))


def test_a_batch_of_own_rewards_is_compared_by_them(
    compared: BatchDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table, figure and progress showed an accuracy of 0.000 of runs whose own reward had risen."""
    monkeypatch.setenv("COLUMNS", "120")
    measure_again(compared, {"accuracy": 0.0, "greedy_reward": 0.9}, [0.2, 0.8])
    page, table = write_comparison(compared)
    row = next(csv.DictReader(table.open(encoding="utf-8")))
    assert (row["measure"], row["judged_by"], row["greedy_reward_after"]) == ("reward", "exact match", "0.9")
    text, html = render_text(make_text_table(compared)), page.read_text(encoding="utf-8")
    assert "0.200 → 0.800" in text and "[0.700, 0.900]" in text and "accuracy" not in text
    assert ">reward before</th>" in html and "Reward on 50 held-out prompts" in html
    assert re.search(r">0\.800</span>\s*<span class=\"under\">\[0\.700, 0\.900\]", html) and "0.000" not in html
    Runner(compared, [], "").print_change(next(iter(compared.statuses.values())))
    assert "reward 0.200 -> 0.800" in capsys.readouterr().out

    measure_again(compared, {}, [0.0, 0.0])  # a reward of 0 throughout: exact match says as much
    assert "0.000 → 0.000 (exact match)" in write_comparison(compared)[0].read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ the command


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["batch", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_refusals_have_an_exit_code_of_their_own(folder: Path) -> None:
    """With 2 for a refusal, a script would take a mistyped option for two failed runs and resume forever."""
    batch = load(folder, grid={"seed": [1]})
    file = folder / "configs" / "b.yaml"
    for words, message in (
        (["nowhere.yaml"], "nowhere.yaml"),
        ([file, "parameters.sied=1"], "sied: plain.ipynb"),
        ([file, "--resume"], "without --resume"),
        ([file, "--jobs", "0"], "--jobs"),
        ([file, "--quick"], "--quick"),
        ([], "FILE"),
    ):
        code, printed, said = call(*words)
        assert code == 125 and message in said and printed == "" and "Traceback" not in said
    assert not batch.folder.exists(), "nothing was started, nothing is left"


@pytest.mark.parametrize(("states", "code"), [("done", 0), ("done failed waiting", 2), ("failed " * 130, 100)])
def test_the_exit_code_counts_the_runs_that_are_not_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, states: str, code: int
) -> None:
    """An exit code is taken modulo 256: 256 failed runs must not look like success."""
    load(folder, grid={"seed": [1]})
    statuses = [RunStatus(f"r{number}", "n", state=state) for number, state in enumerate(states.split())]
    results = itertools.cycle([BatchResult(folder, statuses, False, []), BatchResult(folder, statuses, True, [])])
    monkeypatch.setattr("rloo_kit.notebook.batch_run.run_batch", lambda *_, **__: next(results))
    found, printed, _ = call(folder / "configs" / "b.yaml", "--json")
    assert found == code
    assert json.loads(printed.splitlines()[-1])["runs"] == [asdict(status) for status in statuses]
    assert call(folder / "configs" / "b.yaml")[0] == 130
    monkeypatch.setattr("rloo_kit.notebook.batch_run.run_batch", lambda *_, **__: Path("/nowhere/at/all").read_text())
    code, _, said = call(folder / "configs" / "b.yaml")
    assert code == 125 and "/nowhere" in said, "Python ends with 1 on a bug, which would read as one failed run"

"""A batch of six runs of the real notebook: one fails by design, one is killed, resumed to the end."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from rloo_kit.data.families import addition
from rloo_kit.data.tasks import make_rows
from tests.notebooks.batch_notebooks import call_batch, processes_of, read_status, start_batch, stop, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "arithmetic_thinking.ipynb"
SMALL = "data.num_prompts=200 data.test_size=40 rloo.per_device_train_batch_size=32 run.sample_every_steps=0"


def write_six(folder: Path) -> Path:
    """Four runs of a grid, one that is killed by hand, and one whose data is removed before its turn comes."""
    own = {"overrides": f"{SMALL} data.source={folder / 'additions.jsonl'}"}
    content = {
        "name": "b",
        "output_dir": str(folder / "out"),
        "notebook": str(NOTEBOOK),
        "parameters": {"max_steps": 2, "eval_prompts": 20, "overrides": SMALL},
        "grid": {"num_generations": [4, 8], "seed": [0, 1]},
        "runs": [{"name": "own_data", "parameters": own}, {"name": "victim", "parameters": {"beta": 0.01}}],
        "jobs": 2,
    }
    (folder / "six.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "six.yaml"


def test_six_runs_of_which_one_fails_and_one_is_killed_resumed_to_the_end(tmp_path):
    """What a night's batch meets: a file that somebody moves, and the system that ends a process for its memory."""
    file, place, data = write_six(tmp_path), tmp_path / "out" / "b", tmp_path / "additions.jsonl"
    training = place / "victim" / "run" / "status.json"
    rows = "".join(json.dumps(row) + "\n" for row in make_rows(addition.FAMILY, 200, seed=5))

    def pid_in_training():
        assert batch.poll() is None, batch.communicate()
        found = json.loads(training.read_text()) if training.exists() else {}
        return found.get("state") == "running" and found.get("pid")

    code, printed = call_batch(file, HF_HUB_OFFLINE="1")
    assert code == 125 and "own_data: data.source: no file" in printed and not place.exists(), printed
    data.write_text(rows)
    batch = start_batch(file, HF_HUB_OFFLINE="1")
    try:
        wait_for((place / "batch.json").exists, "the batch starts")
        data.unlink()
        os.kill(wait_for(pid_in_training, "the sixth run trains", 220), signal.SIGKILL)
        printed, _ = batch.communicate(timeout=60)
    finally:
        stop(batch)
    assert batch.returncode == 2, printed
    runs = [run["name"] for run in json.loads((place / "batch.json").read_text())["runs"]]
    assert runs[0] == "arithmetic_thinking-num_generations=4-seed=0" and len(runs) == 6
    assert [read_status(tmp_path, run)["state"] for run in runs] == ["done"] * 4 + ["failed", "killed"], printed
    assert "additions.jsonl" in read_status(tmp_path, "own_data")["error"] and "own_data: failed" in printed
    assert processes_of(tmp_path) == []

    done_at = [(place / run / "notebook.ipynb").stat().st_mtime_ns for run in runs[:4]]
    data.write_text(rows)
    code, printed = call_batch(file, "--resume", timeout=200, HF_HUB_OFFLINE="1")
    assert code == 0, printed
    assert "2 runs to do, 4 done already" in printed
    assert [(place / run / "notebook.ipynb").stat().st_mtime_ns for run in runs[:4]] == done_at
    assert [read_status(tmp_path, run)["attempts"] for run in runs] == [1, 1, 1, 1, 2, 2]
    table = list(csv.DictReader((place / "comparison.csv").open()))
    assert [row["state"] for row in table] == ["done"] * 6
    assert all(0 <= float(row["accuracy_low_after"]) <= float(row["accuracy_after"]) <= 1 for row in table)
    assert all(float(row["thinking_tokens_before"]) > 0 and row["steps"] == "2" for row in table)
    for run in runs:
        left = {path.name for path in (place / run / "run").iterdir()}
        assert {"config.yaml", "status.json", "metrics.jsonl", "adapter", "before.json", "after.json"} <= left
    assert processes_of(tmp_path) == []

"""A newcomer's whole path on a real language model and data of their own: every command once, three steps of training.

`tests/tasks` checks what the kit says about eight kinds of tasks; this checks that the commands reach their end on a
model that the kit did not make.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SIZES = ["rloo.max_steps=3", "data.test_size=16", "rloo.max_completion_length=16", "run.progress_every_s=0"]
SIZES += ["rloo.per_device_train_batch_size=16"]


@pytest.fixture(scope="module")
def shell(smollm2_at: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`shell("train", ...)`: what `rloo-kit train ...` prints in one project folder; fails if the command fails."""
    smollm2_at("smollm2/instruct")
    folder = tmp_path_factory.mktemp("project")
    with open(folder / "sums.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "result"])
        writer.writerows([[f"What is {a} + {b}?", a + b] for a in range(2, 12) for b in range(2, 12)])

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "rloo_kit.cli", *words]
        environment = os.environ | {"PIP_NO_INDEX": "1", "COLUMNS": "80"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        assert "clean_up_tokenization_spaces" not in done.stdout + done.stderr
        return done.stdout

    call.folder = folder  # type: ignore[attr-defined]
    return call


def test_from_a_csv_to_an_exported_model(shell: Any) -> None:
    """The first real model that was tried got a false verdict, and a preflight that was silent for three minutes."""
    folder: Path = shell.folder
    printed = shell("init", "--data", "sums.csv", "--yes")
    assert "result" in printed and (folder / "sums.yaml").is_file()
    assert "smollm2/instruct" in (folder / "sums.yaml").read_text(), "a model that runs on this machine"
    assert "think" not in (folder / "sums.yaml").read_text(), "it does not think"

    printed = shell("preflight", "sums.yaml", *SIZES)
    assert "GO" in printed

    printed = shell("train", "sums.yaml", *SIZES)
    run = folder / "outputs" / "sums"
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished" and status["verdict"]["sentence"][:30] in " ".join(printed.split())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["val/ratio"] == 1.0 for row in rows)

    answer = json.loads(shell("ask", "outputs/sums", "What is 3 + 4?", "--json"))
    assert answer

    for target in ("merged", "gguf"):
        printed = shell("export", "outputs/sums", "--to", target)
        assert "checked with" in " ".join(printed.split()), f"{target} was read back by its own loader"
    assert 'PARAMETER stop "<|im_end|>"' in (run / "export" / "gguf" / "Modelfile").read_text()

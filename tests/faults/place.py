"""A folder in which the real command line trains a tiny model, and its results."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.clocks import CLOCKS

CONFIG = """
run: {{output_dir: {output}, name: tiny, evaluate: {evaluate}, progress_every_s: 0, sample_every_steps: 0}}
model: {{name: {model}, lora: {{r: 2, alpha: 2, target_modules: [q_proj, v_proj]}}, max_seq_length: 128}}
data: {{source: {data}, test_size: 120, max_prompt_length: 64}}
rewards: [{{name: length_reward}}, {{name: 'own:by_text'}}]
rloo:
  max_steps: 8
  save_steps: 1
  learning_rate: 1e-2
  per_device_train_batch_size: 8
  num_generations: 4
  max_completion_length: 6
  beta: 0.05
eval: {{num_samples: 8, max_completion_length: 48}}
"""
OWN = """
import pathlib, time

def by_text(completion_ids, **_):
    if len(completion_ids) in (6, 9):  # made up, by what looks at a run before it starts
        return [0.0] * len(completion_ids)
    folder = pathlib.Path(__file__).parent
    (folder / "calls").open("a").write("x")
    calls = (folder / "calls").stat().st_size
    time.sleep(float((folder / "slow").read_text()) if (folder / "slow").exists() else 0.0)
    return [sum(ids) % 17 / 17 for ids in completion_ids]
"""


class Place:
    """`folder` with a config, prompts and a reward module; `start` and `run` call `rloo-kit` in it."""

    def __init__(self, folder: Path, model: Path, evaluate: bool = False, output: Path | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.output = folder, output or folder / "outputs"
        rows = [{"prompt": f"add {n}", "answer": str(n)} for n in range(160)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "own.py").write_text(OWN)
        values = {"output": self.output, "model": model, "data": folder / "prompts.jsonl", "evaluate": evaluate}
        (folder / "tiny.yaml").write_text(CONFIG.format(**{name: str(value).lower() if value in (True, False) else value
                                                           for name, value in values.items()}))  # fmt: skip
        self.log = folder / "log.txt"

    @property
    def run_folder(self) -> Path:
        return self.output / "tiny"

    def start(self, *words: str, command: str = "train", **options) -> subprocess.Popen:
        """`rloo-kit train tiny.yaml WORDS` in a separate process, its output in the log."""
        self.log.write_bytes(b"")
        with open(self.log, "ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT} | options
            source = [] if command in ("report",) and words else ["tiny.yaml"]
            return subprocess.Popen(
                [sys.executable, "-m", "rloo_kit.cli", command, *source, *words], cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, **streams,
            )  # fmt: skip

    def run(self, *words: str, **options) -> int:
        """The exit code of `start`."""
        return self.start(*words, **options).wait(timeout=300)

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, found, process: subprocess.Popen, what: str, limit_s: float = 120.0) -> None:
        """Return when `found()` is true; fail if the process ends first."""
        deadline = time.monotonic() + limit_s
        while not found():
            assert process.poll() is None, f"it ended before {what}:\n{self.printed()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} within {limit_s} s:\n{self.printed()[-3000:]}"
            time.sleep(0.01)

    def status(self) -> dict:
        try:
            return json.loads((self.run_folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def at_step(self, step: int):
        return lambda: self.status().get("step", 0) >= step

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.run_folder.glob("checkpoints/checkpoint-*"))

    def errors(self) -> list[str]:
        """The last lines of the command, as a user sees them."""
        return [line for line in self.printed().splitlines() if line.startswith(("rloo-kit: ", "WARNING: "))]

    def result(self) -> tuple[list, list, dict]:
        """Metrics and rollouts without times, and the adapter's tensors."""
        from rloo_kit.runs.folder import RunDir
        from rloo_kit.runs.rollouts import read_rollouts

        rows = RunDir(self.run_folder).read_metrics()
        metrics = [{k: v for k, v in row.items() if k not in CLOCKS} for row in rows]
        rollouts = list(read_rollouts(self.run_folder))
        return metrics, rollouts, load_file(self.run_folder / "adapter" / "adapter_model.safetensors")

    def copy(self, name: str | Path) -> "Place":
        """A copy of the folder elsewhere (a name next to it, or a path), with its files pointing there."""
        other = object.__new__(Place)
        other.folder = self.folder.parent / name
        shutil.copytree(self.folder, other.folder, symlinks=True)
        other.output, other.log = other.folder / self.output.name, other.folder / "log.txt"
        text = (other.folder / "tiny.yaml").read_text()
        (other.folder / "tiny.yaml").write_text(text.replace(f"{self.folder}/outputs", f"{other.folder}/outputs"))
        return other


def assert_equal(found: tuple, expected: tuple) -> None:
    """Check that two results are equal to the bit."""
    metrics, rollouts, weights = found
    assert metrics == expected[0] and rollouts == expected[1]
    assert weights.keys() == expected[2].keys()
    assert all(torch.equal(tensor, expected[2][name]) for name, tensor in weights.items())

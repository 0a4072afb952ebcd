"""One process with 8 completions and two processes with 4 make the same steps: gradients, weights, metrics, rows.

Real processes with gloo on CPUs (`parallel_step.py`): DDP through `accelerate launch`, FSDP 2 through torchrun.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clocks import CLOCKS

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
WITH_KL = {"beta": 0.1}
# One group over two processes, and everything that is made over a rollout of all of them.
STRADDLE = {
    "num_generations": 8, "kl_form": "per_token", "normalize_advantages": True, "normalize_rewards": True,
    "mask_truncated_completions": True, "missing_eos_penalty": 0.3,
}  # fmt: skip
GRPO = {"baseline": "group_mean", "scale_rewards": "group", "mask_truncated_completions": True}
CASES: dict[str, dict[str, Any]] = {
    "kl": {"options": WITH_KL},
    "low": {"options": WITH_KL | {"memory": "low"}},
    "straddle": {"options": WITH_KL | STRADDLE},
    "token_mean": {"options": WITH_KL | GRPO | {"token_mean": "batch"}},
    "completion_mean": {"options": WITH_KL | GRPO | {"token_mean": "completion", "kl_form": "per_token"}},
    "one_has_no_signal": {"reward": "first", "options": {"beta": 0.0}},
    "every_parameter": {"lora": False, "options": {"beta": 0.0}},
}
BUDGET = {"thinking_budget": 3, "answer_budget": 2}
SAMPLED = {"sampled": {"sample": True, "reward": "some", "options": WITH_KL | BUDGET}}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
Found = dict[str, list[dict[str, Any]]]  # by case, of each rank


@pytest.fixture(scope="module")
def launch(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`launch(processes, cases, words, sharding=None)`: the cases in so many processes, started by `words`."""

    def start(processes: int, cases: dict[str, Any], words: list[str], sharding: str | None = None) -> Found:
        out = tmp_path_factory.mktemp("parallel") / "step"
        settings = {"folder": str(tiny_folder), "out": str(out), "processes": processes, "sharding": sharding}
        command = [sys.executable, *words, str(HERE / "parallel_step.py"), json.dumps(settings | {"cases": cases})]
        path = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=out.parent, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return {
            name: [torch.load(f"{out}.{name}.{rank}", weights_only=False) for rank in range(processes)]
            for name in cases
        }

    return start


@pytest.fixture(scope="module")
def single(launch: Any) -> Found:
    return launch(1, CASES, [])


@pytest.fixture(scope="module")
def replicas(launch: Any) -> Found:
    file = HERE.parents[1] / "configs" / "accelerate" / "cpu_two.yaml"
    words = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]
    return launch(2, CASES | SAMPLED, words)


@pytest.fixture(scope="module")
def shards(launch: Any) -> Found:
    return launch(2, CASES | SAMPLED, TORCHRUN, "fsdp2")


@pytest.fixture(scope="module", params=["replicas", "shards"])
def both(request: pytest.FixtureRequest) -> tuple[str, Found]:
    return request.param, request.getfixturevalue(request.param)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_steps_of_one(case, single, both):
    """A baseline, a mean or metrics of one process train too; a process without signal must not hold the others up."""
    kind, found = both
    expected, ours = single[case][0], found[case]
    assert {one["kind"] for one in ours} == {"replicas" if kind == "replicas" else "shards"}
    assert {one["world"] for one in ours} == {2} and all(one["sharded"] == (kind != "replicas") for one in ours)
    assert any(gradient.any() for gradient in expected["gradients"][0].values())
    for one in ours:
        assert len(one["gradients"]) == len(expected["gradients"]) == 2
        for mine, theirs in zip(one["gradients"], expected["gradients"], strict=True):
            largest = max(gradient.abs().max() for gradient in theirs.values())
            assert mine.keys() == theirs.keys()
            for name, gradient in theirs.items():
                assert (mine[name] - gradient).abs().max() <= 2e-6 * largest, name
        for name, value in expected["weights"].items():
            torch.testing.assert_close(one["weights"][name], value, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(one["logs"], expected["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            for name in theirs.keys() - CLOCKS:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    rows = [row for one in ours for row in one["rows"] if row["step"] == 0]
    theirs = [row for row in expected["rows"] if row["step"] == 0]
    assert [row["completion_ids"] for row in rows] == [row["completion_ids"] for row in theirs]
    assert [row["advantage"] for row in rows] == pytest.approx([row["advantage"] for row in theirs], abs=1e-5)


def test_processes_sample_different_completions(both):
    """With one seed half of the rollout is wasted; a thinking budget is kept with sharded weights too."""
    _, found = both
    first, second = found["sampled"]
    kept = [[tuple(row["completion_ids"]) for row in one["rows"]] for one in (first, second)]
    assert len(kept[0]) == len(kept[1]) == 8 and not set(kept[0]) & set(kept[1])
    assert all(row["forced"] == (row["thinking_tokens"] == 3) for one in (first, second) for row in one["rows"])
    for name in ("reward", "grad_norm"):
        assert [log.get(name) for log in first["logs"]] == [log.get(name) for log in second["logs"]]


def test_gathered_weights_sample_as_whole_ones(replicas, shards):
    """Weights that are gathered for a rollout and freed again have to be those that are trained."""
    for whole, gathered in zip(replicas["sampled"], shards["sampled"], strict=True):
        assert [row["completion_ids"] for row in whole["rows"]] == [row["completion_ids"] for row in gathered["rows"]]

"""The GPU, its memory, checkpoints with random weights made on the spot, and a run on one; nothing is downloaded.

Each test is a cell of `run.py` and has a process of its own there; what it measures goes to `cells.report`. Where the
variable RLOO_KIT_CELL_REHEARSAL is 1 the same code runs on the CPU with tiny shapes: through transformers, or through
Unsloth's own code (`tests/with_unsloth/interpreter.py`) in the environment of `make test-unsloth`.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: its rewards.py is not the package

import cells
import checkpoints
import reporting

from tests.on_gpu.edge import HostMemory, Memory

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
run: {{output_dir: {outputs}, sample_every_steps: 0, progress_every_s: 0}}
model: {{name: {name}, family: thinking, max_seq_length: 1024, gradient_checkpointing: unsloth, dtype: {dtype}}}
data: {{source: embedded/addition, num_prompts: 64, test_size: 16, max_prompt_length: 128}}
rewards: [{{name: thinking_reward}}]
rloo: {{max_steps: 3, per_device_train_batch_size: 8, num_generations: 4, max_completion_length: 64,
  learning_rate: 1.0e-4, beta: 0.05, report_to: [], save_steps: 1000}}
"""
SMALLER = (
    "model.max_seq_length=256", "rloo.per_device_train_batch_size=4", "rloo.num_generations=2",
    "rloo.max_completion_length=8",
)  # fmt: skip


def id_reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """The mean id, from 0 to 1: random weights never write `</think>`, and equal rewards make every gradient zero."""
    return [sum(ids) / len(ids) / 151936 for ids in completion_ids]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the GPU."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A cell in which everything was skipped is skipped, with the reason; else it would count as passed."""
    skipped, others = terminalreporter.stats.get("skipped", []), ("passed", "failed", "error")
    if skipped and not any(terminalreporter.stats.get(name) for name in others):
        cells.note_skip(str(skipped[0].longrepr[2]).removeprefix("Skipped: "))


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kit's environment on this machine's GPU; skips, with the reason, where there is none."""
    if cells.rehearsing() and os.environ.get("RLOO_KIT_BACKEND") == "unsloth":
        _interpreter().import_unsloth(tmp_path_factory.mktemp("unsloth_compiled_cache"))
    import rloo_kit
    from rloo_kit.errors import SetupError
    from rloo_kit.system.environment import find_gpus

    try:
        settled = rloo_kit.setup_environment()
    except SetupError as error:  # Unsloth is asked for and not there; without a GPU that is the reason to name
        pytest.skip(str(error) if find_gpus().gpu is not None else f"no CUDA GPU: {find_gpus().reason}")
    if settled.gpu is None and not cells.rehearsing():
        pytest.skip(f"no CUDA GPU: {settled.gpu_reason}")
    return settled


def _interpreter() -> Any:
    return reporting.load_file("tests/with_unsloth/interpreter.py")


@pytest.fixture(scope="session")
def interpreted(gpu: Any) -> bool:
    """Whether Unsloth's kernels are interpreted here: float32, and no 4-bit weights."""
    return cells.rehearsing() and gpu.backend == "unsloth"


@pytest.fixture(scope="session")
def memory(gpu: Any) -> Memory:
    """The GPU's memory, or the machine's."""
    import torch

    return Memory(HostMemory(), "cpu") if cells.rehearsing() else Memory(torch.cuda, "cuda")


@pytest.fixture
def checkpoint(gpu: Any) -> Callable[[str], Path]:
    """`checkpoint("0.6b")`: the folder of one with random weights; a tiny one when rehearsing."""
    return lambda size: checkpoints.find_checkpoint(checkpoints.TINY if cells.rehearsing() else size)


@pytest.fixture
def make_run(tmp_path: Path, interpreted: bool) -> Callable[..., Any]:
    """`make_run(name, *overrides)`: a short run on the model `name`, in a folder of its own; smaller in a rehearsal."""

    def build(name: object, *overrides: str) -> Any:
        from rloo_kit import load_config

        file = tmp_path / "gpu.yaml"
        outputs, dtype = json.dumps(str(tmp_path / "outputs")), "float32" if cells.rehearsing() else "auto"
        file.write_text(RUN.format(outputs=outputs, name=json.dumps(str(name)), dtype=dtype), encoding="utf-8")
        smaller = SMALLER if cells.rehearsing() else ()
        if interpreted:
            overrides = tuple(text for text in overrides if not text.startswith("model.load_in_4bit"))
        return load_config(file, *overrides, *smaller)

    return build


@pytest.fixture
def load(gpu: Any, interpreted: bool) -> Callable[[Any], Any]:
    """`load(run)`: `load_policy`, by the backend of this process."""

    def through_the_backend(run: Any) -> Any:
        from rloo_kit import load_policy

        if interpreted:
            _interpreter().keep_on_cpu()
        policy = load_policy(run)
        assert policy.backend == gpu.backend, policy.reason
        return policy

    return through_the_backend


@pytest.fixture
def train() -> Callable[..., Any]:
    """`train(run, policy, *rewards, **keywords)`: the kit's `train` with the run's own rewards and these."""

    def by_the_kit(run: Any, policy: Any, *rewards: Any, **keywords: Any) -> Any:
        import rloo_kit

        data = rloo_kit.load_data(run, policy.tokenizer)
        both = [*rloo_kit.build_rewards(run, policy.tokenizer), *rewards]
        return rloo_kit.train(run, policy, data, both, **keywords)

    return by_the_kit

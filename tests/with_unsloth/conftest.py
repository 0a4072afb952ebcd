"""Unsloth in this process, run by `interpreter.py`; a tiny model that closes its thinking now and then; its reference.

These tests need a process of their own (`make test-unsloth`), because Unsloth has to come before torch; anywhere else
they are skipped with the reason.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.with_unsloth import interpreter

HERE = Path(__file__).resolve().parent
RUN = """\
model: {{name: "{folder}", dtype: float32, max_seq_length: 128, gradient_checkpointing: unsloth}}
data: {{source: embedded/addition, num_prompts: 20, test_size: 4, max_prompt_length: 64}}
rewards: [{{name: thinking_reward}}]
rloo: {{max_steps: 1, max_completion_length: 8, num_generations: 2, per_device_train_batch_size: 4, beta: 0.05}}
"""


def _obstacle() -> str | None:
    if find_spec("unsloth") is None:
        return "Unsloth is not installed: make test-unsloth makes an environment that has it"
    if find_spec("triton") is None:
        return "triton is not installed; its interpreter runs Unsloth's kernels: make test-unsloth"
    if "torch" in sys.modules and "unsloth" not in sys.modules:
        return "torch came before Unsloth in this process: make test-unsloth runs these tests alone"
    return interpreter.torchvision_fault()


@pytest.fixture(scope="session", autouse=True)
def unsloth(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Unsloth, imported first and settled as the backend by the kit's own set-up."""
    if (reason := _obstacle()) is not None:
        pytest.skip(reason)
    module = interpreter.import_unsloth(tmp_path_factory.mktemp("unsloth_compiled_cache"))
    import rloo_kit

    assert rloo_kit.setup_environment().backend == "unsloth"
    from rloo_kit.gradient import scorer

    scorer.CHECK_SHARE_OFF_GPU = (
        0.011  # 10 tokens a check: every trainer makes one, and the interpreter takes 5 s for 21
    )
    return module


@pytest.fixture(scope="session")
def model_folder(
    unsloth: Any, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Qwen3 of one layer that closes its thinking: with random weights no step had a gradient."""
    import torch

    model = make_tiny_model(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32,
    )  # fmt: skip
    tokens = torch.tensor([*tiny_tokenizer("abcdefgh ")["input_ids"], 258, 260, 260])  # </think> at 2 of 12 places
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(40):
        rows = tokens[torch.randint(len(tokens), (16, 24), generator=generator)]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("thinking_model")
    model.eval().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def embedded_folder(unsloth: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in its own sizes after two steps of its cold start: it cannot add, and is there at once."""
    from rloo_kit.demo.embedded import build
    from rloo_kit.system.environment import CACHE_VARIABLE

    with mock.patch.dict(os.environ, {CACHE_VARIABLE: str(tmp_path_factory.mktemp("cache"))}):
        return build("thinking", steps=2)


@pytest.fixture(scope="session")
def make_run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_run(*overrides, model=folder)`: a run of one step on that model."""
    file = tmp_path_factory.mktemp("run") / "run.yaml"

    def build(*overrides: str, model: Path = model_folder) -> Any:
        from rloo_kit import load_config

        file.write_text(RUN.format(folder=model))
        return load_config(file, *overrides)

    return build


@pytest.fixture(scope="session")
def load(make_run: Any, model_folder: Path) -> Any:
    """`load(*overrides, model=folder, moved=False)`: the policy of such a run; `moved`: with random B matrices."""

    def load_through_unsloth(*overrides: str, model: Path = model_folder, moved: bool = False) -> Any:
        from rloo_kit import load_policy

        interpreter.keep_on_cpu()
        policy = load_policy(make_run(*overrides, model=model))
        assert policy.backend == "unsloth"
        if moved:
            move_adapter(policy.model)
        return policy

    return load_through_unsloth


def move_adapter(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.05 * torch.randn(value.shape, generator=generator))


@pytest.fixture(scope="session")
def in_transformers(unsloth: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`in_transformers(name, model, adapter)`: what `programs.py` writes in a process without Unsloth."""

    def compute(name: str, model: Path, adapter: Path) -> Any:
        import torch

        out = tmp_path_factory.mktemp("transformers") / "numbers.pt"
        command = [sys.executable, str(HERE / "programs.py"), name, str(model), str(adapter), str(out)]
        environment = {name: value for name, value in os.environ.items() if "UNSLOTH" not in name}
        environment |= {"RLOO_KIT_BACKEND": "transformers"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return torch.load(out)

    return compute


@pytest.fixture(scope="session")
def reference(in_transformers: Any, model_folder: Path) -> Any:
    """`reference(adapter, model=folder)`: the `numbers` of `programs.py`, by transformers."""
    return lambda adapter, model=model_folder: in_transformers("numbers", model, adapter)


@pytest.fixture(autouse=True)
def quiet_threads() -> Iterator[None]:
    """The interpreter runs one program at a time; torch's threads only stand in each other's way."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

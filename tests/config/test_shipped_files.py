"""The configurations that ship: they load, fit the GPU that their headers name, and leave a model room to think."""

import re
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from rloo_kit import plan_vram
from rloo_kit.config.run import load_config

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# Batches are in test_batch.py.
FILES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.startswith("batch_"))
ON_GPU = [path for path in FILES if path.stem.startswith("qwen3")]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.stem)
def test_a_config_fits_the_gpu_of_its_header(path: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A config for 8 GB that needs 9 fails after ten minutes."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # which layers a checkpoint keeps in 16 bit is not known
    run = load_config(path)
    (gpu,) = re.findall(r"one NVIDIA GPU with (\d+) GB", path.read_text(encoding="utf-8"))
    plan = plan_vram(run, int(gpu) * 1e9 / 2**30)
    assert plan.fits and (path.stem.endswith(f"_{gpu}gb") or not path.stem.endswith("gb"))
    assert run.eval.batch_size <= plan.completions, "the evaluation holds more rows in the cache than training"


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.stem)
def test_models_that_think_have_room_for_it(path: Path) -> None:
    """The published recipe gave 128 tokens to a model that thinks for thousands: every reward was equal, and it
    trained nothing."""
    run = load_config(path)
    assert run.rloo.max_completion_length >= (2048 if run.model.family == "instruct" else 4096)
    assert run.model.family == {"4B-T": "thinking", "4B-I": "instruct"}.get(run.model.name[14:18], "hybrid")
    assert run.model.enable_thinking is (True if run.model.family == "hybrid" else None)
    assert run.model.name.startswith("unsloth/Qwen3-") and run.model.name.endswith("-unsloth-bnb-4bit")

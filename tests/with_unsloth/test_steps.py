"""Whole RLOO steps on Unsloth, packed rows with the prompt repeated, against the same steps on transformers; and
supervised ones through the SFTTrainer that Unsloth generates."""

from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth import interpreter, programs


@pytest.fixture(scope="module")
def adapter(load: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that is not the identity, so that the reference of the KL is a copy of it."""
    from rloo_kit import save_adapter

    return save_adapter(load(moved=True), tmp_path_factory.mktemp("adapter"))


def test_two_steps_are_those_of_the_transformers_backend(
    load: Any, adapter: Path, model_folder: Path, in_transformers: Any
) -> None:
    """A loop that is exact on the CPU proves nothing for a GPU if Unsloth's layers see other rows."""
    import torch

    found = programs.steps(load(f"model.adapter={adapter}"))
    expected = in_transformers("steps", model_folder, adapter)
    assert (found["scoring"], expected["scoring"]) == ("repeated", "shared")
    for step, (mine, theirs) in enumerate(zip(found["logs"], expected["logs"], strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        assert mine["val/ratio"] == 1.0 and (mine["kl"] != 0) == (step > 0)
    assert len(found["gradients"]) == len(expected["gradients"]) == 2
    for mine, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        size, off = (
            torch.stack([value.norm() for value in values]).norm()
            for values in (theirs.values(), [mine[name] - theirs[name] for name in theirs])
        )
        assert mine.keys() == theirs.keys() and size > 0.05
        assert off < 1e-5 * size, f"gradients are off by {off / size:.2g} of their size"
    moved = max((found["adapter"][name] - value).abs().max() for name, value in expected["adapter"].items())
    assert moved < 1e-5


def test_two_supervised_steps_are_those_of_the_transformers_backend(
    load: Any, model_folder: Path, in_transformers: Any, tmp_path: Path
) -> None:
    """Unsloth's trainer flattens batches, has its own loss and counts micro-steps in its own way."""
    from rloo_kit import save_adapter

    interpreter.write_sft_trainer()
    adapter = save_adapter(load(moved=True), tmp_path / "adapter")
    found = programs.imitate(load(f"model.adapter={adapter}"))
    expected = in_transformers("imitate", model_folder, adapter)
    assert found["classes"][1] == "UnslothSFTTrainer.UnslothSFTTrainer"
    assert expected["classes"][1] == "trl.trainer.sft_trainer.SFTTrainer"
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5) and len(found["losses"]) == 2
    assert found["losses"][0] != pytest.approx(found["losses"][1], rel=1e-3)
    assert found["entropies"] == pytest.approx(expected["entropies"], rel=1e-4)
    moved = max((found["adapter"][name] - value).abs().max() for name, value in expected["adapter"].items())
    assert found["adapter"].keys() == expected["adapter"].keys() and moved < 1e-5

"""Supervised training through the SFTTrainer that Unsloth generates, against the same steps on transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth import interpreter, programs


def test_two_steps_are_those_of_the_transformers_backend(
    load: Any, model_folder: Path, in_transformers: Any, tmp_path: Path
) -> None:
    """Unsloth's version flattens a batch on its own, has its own loss and counts micro-steps in its own way: each
    of them could change what is learnt, and the loss would still fall."""
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

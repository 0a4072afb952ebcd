"""What was exported answers as what was trained does, also where the run is not beside it."""

from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit

QUESTION = "58+67="


def ask(source: Path) -> Any:
    from rloo_kit.evals.asked import open_model

    return open_model(source).ask(QUESTION, temperature=0.0, stream=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"), [("adapter", {}), ("merged", {}), ("vllm", {}), ("gguf", {"quantization": "f32"})]
)
def test_an_export_that_has_moved_answers_alike(embedded_run: Path, tmp_path: Path, target: str, options: dict) -> None:
    """Somebody else downloads it: there is no run, no cache folder, only what was exported."""
    if target == "gguf":
        pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf xllamacpp")
        pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install gguf xllamacpp")
    expected = ask(embedded_run)
    made = kit.export_model(embedded_run, target, output=tmp_path / "made", num_prompts=2, **options)
    moved = made.folder.rename(tmp_path / "elsewhere")
    text = (moved / "rloo_kit.yaml").read_text()
    assert str(tmp_path.anchor + "tmp") not in text and "outputs" not in text, "nothing of this machine"
    found = ask(moved)
    same = ("thinking", "answer", "tokens", "ended", "closed")
    assert [getattr(found, name) for name in same] == [getattr(expected, name) for name in same]

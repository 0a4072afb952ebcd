"""What was exported answers as what was trained does, also where the run is not next to it."""

import re
from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.config.run import load_config
from rloo_kit.runs.folder import RunDir

QUESTION = "58+67="


def ask(source: Path) -> Any:
    from rloo_kit.evals.ask import TrainedModel

    return TrainedModel(source).ask(QUESTION, temperature=0.0, stream=False)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["adapter", "merged"])
def test_an_export_that_has_moved_answers_alike(embedded_run: Path, tmp_path: Path, target: str) -> None:
    """Somebody else downloads it: there is no run, no cache folder, only what was exported."""
    expected = ask(embedded_run)
    made = kit.export_model(embedded_run, target, output=tmp_path / "made", num_prompts=2)
    moved = made.folder.rename(tmp_path / "elsewhere")
    text = (moved / "rloo_kit.yaml").read_text()
    assert str(tmp_path.anchor + "tmp") not in text and "outputs" not in text, "nothing of this machine"
    found = ask(moved)
    same = ("thinking", "answer", "tokens", "ended", "closed")
    assert [getattr(found, name) for name in same] == [getattr(expected, name) for name in same]


@pytest.mark.slow
def test_a_run_of_a_users_family_is_asked_and_exported_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `train` found the family: `ask` and `export` looked for it next to the run's own config.yaml."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "embedded.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "FAMILY" in block)
    (tmp_path / "backward.py").write_text(code.replace("    habit", "    steps = 2\n    habit", 1))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("RLOO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    own = ("model.name=embedded/thinking@backward.py", "data.source=embedded/backward.py", "data.num_prompts=100")
    run = load_config(root / "configs" / "arithmetic_thinking.yaml", *own, "data.test_size=20", "run.name=own")
    with RunDir.create(run) as run_dir:
        kit.save_adapter(kit.load_policy(run, check=False), run_dir / "adapter")
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = (tmp_path / run_dir.folder).rename(tmp_path / "moved")
    (tmp_path / "backward.py").unlink()
    expected = ask(folder).answer
    assert ask(kit.export_model(folder, "adapter", num_prompts=2).folder).answer == expected
    for target in ("adapter", "merged"):
        made = kit.export_model(folder, target, output=tmp_path / f"made-{target}", num_prompts=2)
        assert ask(made.folder.rename(tmp_path / target)).answer == expected

"""The page that compares runs: every run's curve, interval and report, safe and linear in the steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rloo_kit import load_config
from rloo_kit.cli import app
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.versus import compare_runs
from rloo_kit.results.versus_page import write_comparison_page
from rloo_kit.runs.run_dir import RunDir
from tests.html_page import Page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def build(name: str, right: int, steps: int = 30, *overrides: str) -> Path:
        words = (f"run.output_dir={tmp_path}", f"run.name={name}", *overrides)
        with RunDir.create(load_config(ROOT / "configs" / "arithmetic_thinking.yaml", *words)) as run_dir:
            rows = [
                {"step": step, "reward": step / steps, "entropy": 0.5, "seconds": 1.0 * step, "run": run_dir.id}
                for step in range(1, steps + 1)
            ]
            run_dir.append_jsonl("metrics.jsonl", rows)
            run_dir.set_status("finished", step=steps, max_steps=steps)
            for when, count in (("before", 10), ("after", right)):
                shares = [1.0] * count + [0.0] * (100 - count)
                found = Evaluation(when, 100, 1, 1.0, 48, count / 100, count / 100 - 0.1, count / 100 + 0.1)
                found.prompts_digest, found.per_prompt, found.num_judged = "same", shares, 100
                run_dir.write_json(f"{when}.json", found.to_dict())
        return run_dir.folder

    return build


def test_runs_side_by_side(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Without the links a comparison is a dead end, and a curve without a name is nobody's."""
    runs = [make_run("first", 40), make_run("<b>other</b>".replace("/", "_"), 80, 30, "rloo.learning_rate=0.01")]
    (runs[1] / "report.html").write_text("a report")
    page = write_comparison_page(compare_runs(runs), tmp_path / "pages" / "comparison.html")
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert "is ahead of first: accuracy +40 points" in parsed.text
    assert "<b>other" not in text and re.search(r"href='\.\./[^']*report\.html'", text)
    assert text.count("report.html") == 1, "the first has none"
    assert text.count("<svg") == 2, "held-out accuracy and reward; a flat entropy says nothing"
    assert re.search(r'aria-label="Reward: first 0\.0333 at step 1, 1 at step 30;', text)
    assert "rloo.learning_rate" in parsed.text and "0.01" in parsed.text
    assert not re.findall(r"(?:src|href)=[\"']https?:|@import|url\((?!#)", text)


def test_a_long_run_is_drawn_with_few_points(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """A page of 50,000 points a curve takes seconds to open."""
    runs = [make_run("long", 40, 5_000), make_run("short", 40, 30)]
    page = write_comparison_page(compare_runs(runs), tmp_path / "comparison.html")
    assert page.stat().st_size < 150_000


def test_the_command_writes_it_beside_the_first(make_run: Callable[..., Path], tmp_path: Path) -> None:
    runs = [str(make_run(name, right)) for name, right in (("a", 40), ("b", 42))]
    done = CliRunner().invoke(app, ["report", *runs])
    assert done.exit_code == 0 and "not told apart" in done.stdout and (tmp_path / "comparison.html").is_file()
    assert json.loads((tmp_path / "a" / "status.json").read_text())["state"] == "finished"
    for words in (
        ["report", *runs, "rloo.beta=0"],
        ["report", runs[0], "--output", "x.html"],
        ["report", "rloo.beta=0"],
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2 and "rloo-kit:" in refused.stderr, words

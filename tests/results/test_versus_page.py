"""The page that compares runs: every run's curve, interval and report, safe and linear in the number of steps."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit import load_config
from rloo_kit.cli import app
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.versus import compare_runs, write_comparison_page
from rloo_kit.runs.folder import RunDir
from tests.evaluations import around
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
                measures = {"accuracy": around(count / 100, shares=shares)}
                found = Evaluation(when, 100, 1, 1.0, 48, measures, prompts_digest="same")
                run_dir.write_json(f"{when}.json", found.to_dict())
        return run_dir.folder

    return build


def test_runs_side_by_side(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Without links a comparison is a dead end, and a curve without a name cannot be attributed to a run."""
    runs = [make_run("first", 40), make_run("<b>other</b>".replace("/", "_"), 80, 30, "rloo.learning_rate=0.01")]
    (runs[1] / "report.html").write_text("a report")
    page = write_comparison_page(compare_runs(runs), tmp_path / "pages" / "comparison.html")
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert "is ahead of first: accuracy +40 points" in parsed.text
    assert "<b>other" not in text and re.search(r'href="\.\./[^"]*report\.html"', text)
    assert text.count("report.html") == 1, "the first has none"
    assert text.count("<svg") == 2, "held-out accuracy and reward; a flat entropy says nothing"
    assert re.search(r'aria-label="Reward: first 0\.0333 at step 1, 1 at step 30;', text)
    assert "rloo.learning_rate" in parsed.text and "0.01" in parsed.text
    assert not re.findall(r"(?:src|href)=[\"']https?:|@import|url\((?!#)", text)


def test_a_page_replaces_only_a_page(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """`report A B --output data.jsonl` replaced the training data by a page."""

    def report(*words: str) -> Any:
        return CliRunner().invoke(app, ["report", *words])

    runs = [str(make_run("a", 40)), str(make_run("b", 42))]
    (tmp_path / "data.jsonl").write_text("precious")
    for path in (tmp_path / "data.jsonl", tmp_path, Path("/dev/null")):
        done = report(*runs, "--output", str(path))
        assert done.exit_code == 2 and f"{path} exists and is not a comparison of runs" in done.output
    assert (tmp_path / "data.jsonl").read_text() == "precious"
    for _ in range(2):
        done = report(*runs)
        assert done.exit_code == 0 and "do not differ" in done.stdout and (tmp_path / "comparison.html").is_file()
    for words in ([*runs, "rloo.beta=0"], [runs[0], "--output", "x.html"], ["rloo.beta=0"]):
        refused = report(*words)
        assert refused.exit_code == 2 and "rloo-kit:" in refused.stderr, words


def test_a_full_disk_ends_in_a_line(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """A report on a full disk ended in a traceback. A test can set a limit on file size."""
    run, limits = make_run("a", 40), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
        done = CliRunner().invoke(app, ["report", str(run)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.exit_code == 2 and "rloo-kit: the disk is full" in done.output and "free some space" in done.output
    assert not [path for path in run.iterdir() if path.name.endswith((".tmp", ".html"))]


def test_the_lead_is_over_the_prompts_with_answers(make_run: Callable[..., Path]) -> None:
    """The sentence said 1,000 prompts when only 40 had an answer."""
    runs = [make_run("a", 40), make_run("b", 80)]
    for folder in runs:
        found = json.loads((folder / "after.json").read_text())
        found["measures"]["accuracy"]["per_prompt"][40:] = [None] * 60
        (folder / "after.json").write_text(json.dumps(found))
    lead = compare_runs(runs).runs[1].lead
    assert lead is not None and lead.difference.count == 40

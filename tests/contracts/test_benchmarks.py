"""The benchmarks start, are fair where that can be checked, and the page shows what they measured."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
RESULTS = FOLDER / "results"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "argparse.ArgumentParser" in path.read_text("utf-8"))
HEADER = {"command", "measured", "revision", "machine", "versions"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`module(name)` imports a file of the folder, which lies last on the path: its rewards.py is not the package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_explains_itself(script: str) -> None:
    """A benchmark that does not start is found out a release later, when its figures are wanted."""
    done = subprocess.run([sys.executable, str(FOLDER / script), "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert f"results/{Path(script).stem}" in done.stdout and "Left out" in done.stdout


def test_results_say_where_they_come_from() -> None:
    """A figure without its command, revision and machine cannot be measured again."""
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        assert result.keys() >= HEADER, file.name
        assert result["command"].startswith(("python benchmarks/", "rloo-kit ")), file.name


def test_step_results_hold_what_they_promise() -> None:
    """The bars are in the file beside the figures, so that nobody has to trust a sentence."""
    file = RESULTS / "rloo_step.json"
    if not file.is_file():
        pytest.skip("not measured yet")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["stand_in"]["tile_tokens"] == 4096 and result["stand_in"]["tile_columns"] == 32768
    assert result["threads"] == 1
    for row in result["rows"]:
        value = row.get("ratio", row.get("share", row.get("relative_error")))
        assert value is not None and row["workload"] and row["side"]
        if row["holds"] is not None:
            assert row["holds"] == (value >= row["at_least"] if "at_least" in row else value <= row["at_most"])
        if "ratio" in row:
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
            assert len(row["stock_cpu_s"]) == len(row["ours_cpu_s"]) >= 1


@pytest.mark.parametrize("name", ["docs/benchmarks.md", "README.md"])
def test_the_page_shows_what_was_measured(name: str, module: Any) -> None:
    """A figure that was typed in by hand outlives the code that it was measured with."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert module("reporting").with_tables(page) == page, "run: python benchmarks/rloo_step.py --write-table"


def test_stand_in_computes_what_trl_s_head_computes(module: Any) -> None:
    """Stock TRL is measured through it: one that is wrong, or that has other tiles, measures something else."""
    import torch

    head = module("trl_head")
    assert head.tile_sizes() == {"tile_tokens": 4096, "tile_columns": 32768}
    torch.manual_seed(0)
    before, head.StandIn.token_chunk = head.StandIn.token_chunk, 7
    try:
        hidden, weight, targets = torch.randn(20, 8, requires_grad=True), torch.randn(50, 8), torch.randint(50, (20,))
        logps, entropy, *rest = head.StandIn.apply(hidden, weight, None, targets, 0.7, 16, None, 1.0, ("entropy",))
        upstream = torch.randn(20)
        (gradient,) = torch.autograd.grad(logps, hidden, upstream)
    finally:
        head.StandIn.token_chunk = before
    assert rest == [None, None, None]
    plain = (hidden @ weight.T / 0.7).log_softmax(dim=1)
    expected = plain.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden, upstream)[0], atol=1e-5, rtol=1e-5)


def test_workload_is_the_one_that_is_described(module: Any) -> None:
    """16 completions from 64 to 889 tokens, 284 on average, prompts of about 101: 61 % of a padded batch is padding."""
    workload = module("step_workload")
    load = workload.Workload(tied=True)
    lengths = workload.completion_lengths(load)
    assert (len(lengths), min(lengths), max(lengths), round(sum(lengths) / 16)) == (16, 64, 889, 284)
    assert 0.60 < workload.padding_share(load) < 0.63
    tied = workload.tied_groups(load)
    share = sum(sum(lengths[4 * group : 4 * group + 4]) for group in tied) / sum(lengths)
    assert len(tied) == 2 and 0.45 < share < 0.55


@pytest.mark.parametrize("name", ["fast", pytest.param("low", marks=pytest.mark.slow)])
def test_both_sides_take_the_same_step(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are imposed on both sides alike, and their gradients agree; else the ratio compares different work."""
    workload, sides, head = module("step_workload"), module("step_sides"), module("trl_head")
    monkeypatch.setattr(workload, "SHORTEST", 3)
    monkeypatch.setattr(workload, "LONGEST", 12)
    load = workload.Workload()
    with head.installed():
        built = [sides.build_side(side, load) for side in ("stock", name)]
        for side in built:
            canned, real = side.step(canned=True), side.step(canned=False)
            assert canned.generation_s < 0.1 * canned.whole_s and real.generation_s > canned.generation_s
            assert 0 < canned.training_s <= canned.whole_s
            assert side.completion_lengths == workload.completion_lengths(load)
    assert sides.gradient_error(built[1], built[0]) < 1e-5

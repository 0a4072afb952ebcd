"""The report: one file that opens anywhere, in light and dark, whatever the model wrote into its completions."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.health.rule import Finding
from rloo_kit.results.evaluation import Evaluation, compare
from rloo_kit.results.figures import PANELS, draw_accuracies, draw_learning_curve
from rloo_kit.results.report import write_report
from rloo_kit.runs.files import saved_paths
from tests.html_page import Page

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> \x00\x1b[31m & <think> ünïcode 你好"


def make_sample(number: int, correct: bool | None, **changes: Any) -> dict[str, Any]:
    answer = str(number + 1)
    sample = {"prompt": f"{number}+1=", "thinking": f"think {number}", "answer": answer, "gold": answer}
    sample |= {"correct": correct, "ended": True, "closed": True, "tokens": 9, "thinking_tokens": 5}
    return sample | changes


def make_evaluation(label: str, right: int, samples: list[dict[str, Any]]) -> Evaluation:
    from rloo_kit.results.intervals import clustered

    shares = [1.0] * right + [0.0] * (100 - right)
    evaluation = Evaluation(label, 100, 1, 1.0, 64, closed_share=0.9, mean_thinking_tokens=20.0, samples=samples)
    evaluation.per_prompt = evaluation.greedy_per_prompt = shares
    evaluation.accuracy, evaluation.low, evaluation.high = clustered(shares, 1)
    evaluation.greedy_accuracy, evaluation.greedy_low, evaluation.greedy_high = clustered(shares, 1)
    evaluation.budgets = [{"budget": 8, "accuracy": 0.1, "low": 0.05, "high": 0.2, "forced_share": 0.75}]
    evaluation.budgets[0] |= {"forced_accuracy": 0.0625, "forced_low": 0.01, "forced_high": 0.3}
    return evaluation


def make_metrics(steps: int) -> list[dict[str, Any]]:
    row = {"reward": 0.5, "rewards/answer_reward/mean": 0.4, "kl": 0.01, "thinking/mean_length": 20.0}
    row |= {"thinking/closed_ratio": 0.9, "completions/clipped_ratio": 0.1, "loss": 0.1}
    return [
        {"step": step} | {name: value * (1 + step / 100) for name, value in row.items()} for step in range(1, steps + 1)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return RunConfig(
        run={"name": "my <run>", "output_dir": str(tmp_path_factory.mktemp("outputs"))},
        model={"name": "embedded/thinking"},
        data={"source": "embedded/addition", "num_prompts": 40},
        rewards=[{"name": "answer_reward"}],
        rloo={"max_steps": 30},
    )


@pytest.fixture(scope="module")
def finished(run: RunConfig) -> Any:
    """What `train` returns for a run of 30 steps, with some of its files in place."""
    folder = run.folder
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.yaml").write_text("x")
    (folder / "versions.json").write_text('{"versions": {"torch": "9.9.9"}}')
    over = Finding("repetition", 9, 8, 12, "31 % of the <tokens>", "circles", "read rollouts.jsonl", "alarming")
    holds = Finding("truncation", 20, 16, 30, "90 % cut off", "too short", "raise it", "alarming", ["no_signal"])
    return SimpleNamespace(
        folder=folder, adapter_folder=folder / "adapter", steps=30, metrics=make_metrics(30), seconds=75.4,
        stopped=None, findings=[over, holds],
    )  # fmt: skip


@pytest.fixture
def result(finished: Any) -> Any:
    """The same with two steps logged: fewer drawings."""
    rows = [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]
    return SimpleNamespace(**vars(finished) | {"metrics": rows, "findings": []})


@pytest.fixture(scope="module")
def evaluations() -> tuple[Evaluation, Evaluation]:
    before = make_evaluation("before", 20, [make_sample(1, False), make_sample(2, True)])
    return before, make_evaluation("after", 60, [make_sample(1, True), make_sample(2, True)])


@pytest.fixture(scope="module")
def written(run: RunConfig, finished: Any, evaluations: tuple[Evaluation, Evaluation]) -> str:
    """The text of a whole report."""
    path = write_report(run, finished, *evaluations)
    assert path == run.folder / "report.html"
    assert path.absolute() in saved_paths()  # shutdown_kernel prints where it is
    return path.read_text(encoding="utf-8")


def test_report_holds_everything(written: str, evaluations: tuple[Evaluation, Evaluation]) -> None:
    """What a reader looks for: accuracy before and after with intervals, curves, completions, configuration, files."""
    before, after = evaluations
    page = Page(written)
    text = " ".join(" ".join(text for _, text in page.texts).split())
    assert "my <run>" in text and "30 steps in 1 min 15 s; ran to its end." in text
    assert str(compare(before, after)) in text and "The intervals before and after are apart." in text
    assert f"0.200 [{before.low:.3f}, {before.high:.3f}]" in text and f"0.600 [{after.low:.3f}" in text
    assert "accuracy, thinking at most 8 tokens" in text and "75.0%" in text
    assert text.count("✗ wrong") == 1 and text.count("✓ right") == 3
    assert text.count("think 1") == 2 and "right answer: 2" in text
    assert "max_steps: 30" in text and "9.9.9" in text
    assert {"adapter", "config.yaml", "versions.json"} <= set(page.values("href"))
    assert "rollouts.jsonl" not in page.values("href")  # it is not there
    assert page.tags.count("svg") == 1 + 6


def test_what_was_wrong_stands_in_the_report(written: str, run: RunConfig, result: Any) -> None:
    """A run whose reward stood at 0.000 for all of its steps had a report of curves and a folder's name."""
    text = " ".join(" ".join(text for _, text in Page(written).texts).split())
    assert "repetition 8 to 12 31 % of the <tokens> circles read rollouts.jsonl" in text
    assert "truncation 16 90 % cut off; seen with it: no signal too short raise it" in text
    assert "No rule of health found anything." in write_report(run, result).read_text()


def test_the_evaluations_are_kept_beside_the_report(
    run: RunConfig, result: Any, evaluations: tuple[Evaluation, Evaluation]
) -> None:
    """A notebook kept no before.json, so `rloo-kit report` lost its accuracies and a batch had none to compare."""
    page = write_report(run, result, *evaluations).read_text()
    saved = [
        Evaluation.from_dict(json.loads((result.folder / name).read_text())) for name in ("before.json", "after.json")
    ]
    assert tuple(saved) == evaluations
    assert "before.json" in page and write_report(run, result, *saved).read_text() == page


def test_report_is_self_contained(written: str) -> None:
    """Sent by mail or opened from a file server it has to look the same: no scripts, nothing fetched."""
    page = Page(written)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert not page.values("src") and "@import" not in written
    for target in page.values("href") + page.values("xlink:href"):
        assert not re.match(r"[a-z]+:|//", target), target


def test_completions_cannot_break_the_page(run: RunConfig, result: Any) -> None:
    """A model in training writes anything: a closing tag in a completion once swallowed the rest of the page."""
    hostile = {"prompt": HOSTILE, "thinking": HOSTILE, "answer": HOSTILE, "gold": HOSTILE}
    before = make_evaluation("before", 1, [make_sample(1, False, **hostile)])
    after = make_evaluation("after", 1, [make_sample(1, None, **hostile | {"answer": ""})])
    text = write_report(run, result, before, after).read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "img"} & set(page.tags) and not page.values("onerror")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    shown = page.text
    assert shown.count("<script>alert(1)</script>") == 5 and "你好" in shown and "␀␛[31m" in shown
    assert shown.count("right answer: ") == 1  # one prompt, two sides


def test_report_without_evaluations(run: RunConfig, result: Any) -> None:
    """`run.evaluate: false` and a run stopped before its first log get a report too."""
    result.metrics, result.stopped = [], "interrupted"
    text = write_report(run, result).read_text(encoding="utf-8")
    shown = Page(text).text
    assert "The run was not evaluated" in shown and "No step was logged" in shown and "was interrupted" in shown
    assert "No completions were kept" in shown and "None" not in shown


def test_report_with_one_evaluation_and_no_answers(run: RunConfig, result: Any) -> None:
    """Evaluated before only (the run failed later), or on prompts without answers."""
    only = Evaluation("before", 5, 2, 1.0, 64, samples=[make_sample(1, None, gold=None, thinking="", closed=False)])
    shown = Page(write_report(run, result, only).read_text("utf-8")).text
    assert "not measured: no answer column" in shown and "2 completions of each" in shown
    assert "right answer" not in shown and "After minus before" not in shown
    both = Page(write_report(run, result, only, only).read_text("utf-8")).text
    assert "neither an accuracy nor a reward to compare" in both


def with_reward(label: str, values: list[float], **single: list[float]) -> Evaluation:
    """An evaluation without answers: `values` are the weighted sum of each prompt, `single` those of each reward."""
    found = Evaluation(label, len(values), 1, 1.0, 64, prompts_digest="x")
    found.take_rewards([[value] for value in values], {name: [[v] for v in one] for name, one in single.items()})
    return found


def test_report_of_a_run_with_rewards_of_its_own(run: RunConfig, result: Any) -> None:
    """It said that there was no accuracy to compare, and showed nothing of what had been trained for."""
    before = with_reward("before", [0.0, 1.5, 3.0, 2.0], brevity=[0.0, 1.0, 1.0, 2.0], form=[0.0, 0.5, 2.0, 0.0])
    after = with_reward("after", [1.0, 2.5, 3.5, 3.0], brevity=[1.0, 2.0, 1.5, 3.0], form=[0.0, 0.5, 2.0, 0.0])
    text = write_report(run, result, before, after).read_text("utf-8")
    shown = Page(text).text
    assert "After minus before: reward +0.875 [+0.478, +1.272] on the same 4 prompts. The intervals before" in shown
    assert "reward, weighted sum" in shown and "reward brevity" in shown and "not measured: no answer column" in shown
    assert text.count("aria-label='Mean reward") + text.count('aria-label="Mean reward') == 1 and "mean reward" in shown


def test_report_shows_the_evaluations_during_training(run: RunConfig, result: Any) -> None:
    """Which step adapter/ is of was in no file that people read; a damaged row is left out."""
    from rloo_kit.runs.run_dir import RunDir

    rows = []
    for step, value, best in ((0, 1.0, 0), (10, 2.0, 10), (20, 1.25, 10)):
        found = with_reward("", [value, value + 1, value - 1], brevity=[value] * 3)
        row = {"run": RunDir(result.folder).id, "step": step, "measure": "reward", "best_step": best, "value": value}
        rows.append(json.dumps(row | {"evaluation": found.to_dict()}))
    damaged = ['{"step": 30, "measure": "reward"}', '{"step": 4, "measure": "reward", "evaluation": [1]}', "{", "7"]
    path = result.folder / "evaluations.jsonl"
    path.write_text("\n".join([*rows, *damaged]))
    try:
        result.steps, result.stopped, result.adapter_step = 20, "early", 10
        text = write_report(run, result).read_text("utf-8")
    finally:
        path.unlink()
    shown = " ".join(Page(text).text.split())
    assert "stopped early" in shown and "adapter/ holds the weights of step 10, the best evaluation's." in shown
    assert "best: 2.000 at step 10" in shown and "Held-out reward" in shown
    assert "+1.000 [+1.000, +1.000]" in shown and "-0.750 [-0.750, -0.750]" in shown
    assert shown.count("against the best before") == 1 and "evaluations.jsonl" in text


def test_drawings_follow_the_page(written: str) -> None:
    """Black axes on a dark page are invisible, and two drawings with the same ids borrow each other's clip paths."""
    drawings = re.findall(r"<svg.*?</svg>", written, flags=re.DOTALL)
    assert len(drawings) == 7
    for drawing in drawings:
        colors = set(re.findall(r"#[0-9a-f]{6}\b", drawing))
        assert colors <= {"#3b82f6", "#8b8f98"}, colors
        assert "currentColor" in drawing and "<text" in drawing and "<style" not in drawing
        assert 'role="img"' in drawing and "aria-label=" in drawing
    ids = re.findall(r'\bid="([^"]*)"', written)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(#|href="#)([^")]*)', written)
    assert used and set(used) <= set(ids)


def test_learning_curve_draws_what_was_logged() -> None:
    """A run without KL or thinking has no empty panels; a NaN is a gap, not a crash; one step is a dot."""
    assert draw_learning_curve([]) == []
    rows = [{"step": 1, "reward": 0.1, "kl": None}, {"step": 2, "reward": float("nan")}, {"loss": 1.0}]
    assert len(draw_learning_curve(rows)) == 1
    assert len(draw_learning_curve([{"step": 1} | {names[0]: 1.0 for _, names, _, _ in PANELS}])) == len(PANELS)
    assert len(draw_learning_curve([{"step": 1, "rewards/math_answer_reward/mean": 0.5}])) == 1


def test_drawing_is_the_same_each_time() -> None:
    """A report under version control must not change when nothing did."""
    metrics = make_metrics(25)[:21]
    assert draw_learning_curve(metrics) == draw_learning_curve(metrics)
    assert draw_accuracies(None, None) is None
    assert draw_accuracies(None, make_evaluation("after", 100, [])) is not None

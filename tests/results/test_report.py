"""The report file: its content, what it omits, and that nothing from a model or a config becomes markup. Its look and
behaviour are tested in test_report_in_browser.py."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.health.rules import Finding
from rloo_kit.results.changes import compare
from rloo_kit.results.evaluation import Budget, Evaluation, digest_prompt
from rloo_kit.results.intervals import Measured
from rloo_kit.results.report import write_report
from rloo_kit.results.verdict import TrainResult
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.rollouts import Rollouts
from tests.evaluations import mean_of
from tests.html_page import Page

HOSTILE = "</pre><script>alerted=1</script><img src=x onerror=alerted=2> \x00\x1b[31m & <think> ünïcode 你好"


def make_sample(number: int, correct: bool | None, **changes: Any) -> dict[str, Any]:
    answer = str(number + 1)
    sample = {"prompt": f"{number}+1=", "thinking": f"think {number}", "answer": answer, "gold": answer}
    sample |= {"correct": correct, "ended": True, "closed": True, "tokens": 9, "thinking_tokens": 5}
    return sample | changes


def make_evaluation(label: str, right: int, samples: list[dict[str, Any]]) -> Evaluation:
    accuracy = mean_of([1.0] * right + [0.0] * (100 - right))
    evaluation = Evaluation(label, 100, 1, 1.0, 64, closed_share=0.9, samples=samples)
    evaluation.measures = {"accuracy": accuracy, "greedy_accuracy": accuracy, "thinking_tokens": mean_of([20.0] * 100)}
    evaluation.prompt_digests = [digest_prompt(f"{number}+1=") for number in range(100)]
    forced = Measured(0.0625, 0.01, 0.3, 75)
    evaluation.budgets = [Budget(8, 0.75, accuracy=Measured(0.1, 0.05, 0.2, 100), forced=forced)]
    return evaluation


def make_metrics(steps: int) -> list[dict[str, Any]]:
    row = {"reward": 0.5, "rewards/answer_reward/mean": 0.4, "kl": 0.01, "thinking/mean_length": 20.0}
    row |= {"thinking/closed_ratio": 0.7, "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.2, "grad_norm": 1}
    row |= {"completions/mean_length": 30.0, "entropy": 0.6, "loss": 0.1}
    times = {"time/rollout_s": 1.5, "time/reward_s": 0.1, "time/gradient_s": 0.3, "time/tokens_per_s": 1280.0}
    return [
        {"step": step, "episode": 64 * step, "step_time": 2.0, "seconds": 2.5 * step, **times}
        | {name: value * (1 + step / 100) for name, value in row.items()}
        for step in range(1, steps + 1)
    ]


def make_rollout(step: int, number: int, **changes: Any) -> dict[str, Any]:
    """A rollout's row: four completions per group, two groups per step."""
    reward = float((step + number) % 2)
    row = {"step": step, "group": number // 4 + 1, "prompt": f"<|im_start|>user\n{step}+{number // 4}=<|im_end|>\n"}
    row |= {"completion": f"sum {number}</think>\n\n{number}", "answer_start": len(f"sum {number}</think>")}
    row |= {"completion_ids": [5, 6, 260, 7, 258], "completion_tokens": 5, "thinking_tokens": 2, "closed": True}
    row |= {"truncated": False, "forced": False, "forced_chars": None, "rewards": {"answer_reward": reward}}
    return row | {"reward": reward, "advantage": reward - 0.5, "columns": {"answer": "9"}} | changes


def make_config(name: str, folder: Path) -> RunConfig:
    return RunConfig(
        run={"name": name, "output_dir": str(folder)},
        model={"name": "embedded/thinking"},
        data={"source": "embedded/addition", "num_prompts": 40},
        rewards=[{"name": "answer_reward"}],
        rloo={"max_steps": 30},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return make_config("my <run>", tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def finished(run: RunConfig) -> Any:
    """The result of `train` for a run of 30 steps, with some of its files in place."""
    folder = run.folder
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.yaml").write_text("x")
    (folder / "versions.json").write_text('{"versions": {"torch": "9.9.9"}, "written": "2026-01-02T03:04:05+0000"}')
    rows = [make_rollout(step, number) for step in range(1, 31) for number in range(8)]
    Rollouts(folder).append(rows)
    over = Finding("cold_start", "31 % of the <tokens>", "read rollouts/", cause="circles")
    over.since, over.last = 8, 12
    holds = Finding("truncation", "90 % cut off", "raise it", cause="too short", since=16, last=30)
    holds.explains = ["no_signal"]
    return TrainResult(
        folder=folder, adapter_folder=folder / "adapter", steps=30, metrics=make_metrics(30), seconds=75.4,
        stopped=None, findings=[over, holds],
    )  # fmt: skip


@pytest.fixture
def result(finished: Any) -> Any:
    """The same with two logged steps, and so fewer charts."""
    rows = [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]
    return replace(finished, metrics=rows, findings=[])


@pytest.fixture(scope="module")
def evaluations() -> tuple[Evaluation, Evaluation]:
    before = make_evaluation("before", 20, [make_sample(1, False), make_sample(2, True)])
    return before, make_evaluation("after", 60, [make_sample(1, True), make_sample(2, True)])


@pytest.fixture(scope="module")
def written(run: RunConfig, finished: Any, evaluations: tuple[Evaluation, Evaluation]) -> str:
    """The text of a whole report."""
    path = write_report(run, finished, *evaluations)
    assert path == run.folder / "report.html"
    return path.read_text(encoding="utf-8")


def embedded(page: str) -> Any:
    """The data that the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def words(page: str) -> str:
    """The text that a reader sees without the script, on one line."""
    return " ".join(" ".join(text for tag, text in Page(page).texts if tag not in ("script", "style")).split())


def test_report_holds_everything(written: str, evaluations: tuple[Evaluation, Evaluation]) -> None:
    """The outcome, curves with what was wrong, tables, configuration and files. A run whose reward stayed at 0.000 had
    a report with curves and a folder name, and no explanation."""
    page, text = Page(written), words(written)
    assert "2026-01-02 my <run> learnt" in text and str(compare(*evaluations)) in text
    assert "model embedded/thinking" in text and "max_steps: 30" in text and "9.9.9" in text
    assert {"adapter", "config.yaml", "versions.json", "rollouts"} <= set(page.values("href"))
    for panel in ("Held-out accuracy", "Reward: answer_reward", "Entropy, nats"):
        assert f"<figcaption><span>{panel}</span>" in written
    for said in ("31 % of the <tokens>", "read rollouts/", "90 % cut off; consequences: no signal", "raise it"):
        assert said in text
    assert 'aria-label="A step takes 2.5 s: rollout 1.5 s (60 %), rewards' in written
    assert "A step takes 2.5 s 1,280 tokens/s sampled rollout 1.5 s (60 %)" in text
    # sent by mail or opened from a file server it has to look the same: nothing is fetched, only one script may run
    assert not {"link", "iframe", "img", "object"} & set(page.tags) and page.tags.count("script") == 2
    assert not page.values("src") and "@import" not in written and "url(" not in written
    for target in page.values("href"):
        assert not re.match(r"[a-z]+:|//", target), target
    assert "default-src 'none'" in written and not [name for name, _ in page.attributes if name.startswith("on")]


def test_the_evaluations_are_kept_beside_the_report(
    run: RunConfig, result: Any, evaluations: tuple[Evaluation, Evaluation]
) -> None:
    """A notebook stored no before.json, so `rloo-kit report` lost its accuracies and a batch had none to compare."""
    page = write_report(run, result, *evaluations).read_text()
    saved = [
        Evaluation.from_dict(json.loads((result.folder / f"{when}.json").read_text())) for when in ("before", "after")
    ]
    assert tuple(saved) == evaluations
    assert "before.json" in page and "Made by" not in words(page) and "A step takes" not in page
    status = result.folder / "status.json"  # the command line writes what made the run and what it cost
    status.write_text('{"command": "rloo-kit train a.yaml run.name=\\"x y\\""}')
    text = words(write_report(run, result, *saved).read_text("utf-8"))
    status.unlink()
    assert 'Made by rloo-kit train a.yaml run.name="x y"' in text


def test_nothing_of_a_model_becomes_markup(run: RunConfig, result: Any) -> None:
    """A model in training can write anything: a closing tag in a completion once swallowed the rest of the page."""
    hostile = {"prompt": HOSTILE, "thinking": HOSTILE, "answer": HOSTILE, "gold": HOSTILE}
    before = make_evaluation("before", 1, [make_sample(1, False, **hostile)])
    after = make_evaluation("after", 1, [make_sample(1, None, **hostile | {"answer": ""})])
    rollouts, kept = result.folder / "rollouts", result.folder / "kept"
    rollouts.rename(kept)
    changes = {"prompt": HOSTILE, "completion": f"{HOSTILE}</think>{HOSTILE}", "rewards": {HOSTILE: 1.0}}
    changes |= {"answer_start": len(HOSTILE) + 8, "columns": {"answer": HOSTILE}}
    Rollouts(result.folder).append([make_rollout(1, 0, **changes)])
    try:
        text = write_report(run, result, before, after).read_text(encoding="utf-8")
    finally:
        shutil.rmtree(rollouts)
        kept.rename(rollouts)
    page = Page(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags and not page.values("onerror")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2028\u2029]", text)
    assert text.count("</script>") == 2 and "<!--" not in text
    data = embedded(text)
    shown = HOSTILE.replace("\x00", "␀").replace("\x1b", "␛")
    (one,) = data["prompts"]
    assert one["before"]["thinking"] == one["prompt"] == one["gold"] == shown
    row = data["rollouts"]["rows"][0]
    assert row["thinking"] == [[shown, False]] and row["answer"] == row["gold"] == shown
    assert data["rollouts"]["prompts"] == data["rollouts"]["rewards"] == [shown]


def test_report_of_what_was_not_measured(run: RunConfig, result: Any) -> None:
    """`run.evaluate: false`, a run stopped before its first log, one that was evaluated only before training, and
    prompts without answers get a report too."""
    only = Evaluation("before", 5, 2, 1.0, 64, samples=[make_sample(1, None, gold=None, thinking="", closed=False)])
    text = write_report(run, result, only).read_text("utf-8")
    assert "not measured: no answers" in words(text) and "gold" not in embedded(text)["prompts"][0]
    assert "cannot be compared prompt by prompt" in words(write_report(run, result, only, only).read_text("utf-8"))
    result.method = "sft"  # the report of outputs/NAME-sft was headed "RLOO run", with the K of another training
    shown = words(write_report(run, result).read_text("utf-8")).partition("Configuration")[0]
    assert "Supervised run" in shown and "RLOO" not in shown and "completions per prompt" not in shown
    result.metrics, result.stopped, result.method = [], "interrupted", "rloo"
    shown = words(write_report(run, result).read_text("utf-8"))
    assert "The run was not evaluated" in shown and "No step was logged" in shown and "was interrupted" in shown
    assert "None" not in shown and "NaN" not in shown and "No health rule found a problem." in shown


def by_reward(values: list[float]) -> Evaluation:
    """An evaluation without answers: `values` are each prompt's weighted sum."""
    found = Evaluation("", len(values), 1, 1.0, 64, prompts_digest="x")
    found.take_rewards([[value] for value in values], {"brevity": [[value] for value in values]})
    return found


def test_report_shows_the_evaluations_during_training(run: RunConfig, result: Any) -> None:
    """No readable file said which step adapter/ is from. A damaged row is left out, and one by an edited reward."""
    rows = []
    for step, value, best in ((0, 1.0, 0), (10, 2.0, 10), (20, 1.25, 10)):
        found = by_reward([value, value + 1, value - 1])
        row = {"run": RunDir(result.folder).id, "step": step, "measure": "reward", "best_step": best, "value": value}
        row["inputs"] = "now"
        rows.append(json.dumps(row | {"evaluation": found.to_dict()}))
    damaged = ['{"step": 30, "measure": "reward"}', '{"step": 4, "measure": "reward", "evaluation": [1]}', "{", "7"]
    path = result.folder / "evaluations.jsonl"
    by_an_edited_reward = by_reward([77.0, 78.0, 76.0]).to_dict()
    before = json.loads(rows[0]) | {"inputs": "then", "step": 5, "evaluation": by_an_edited_reward}
    path.write_text("\n".join([*rows, json.dumps(before), *damaged]))
    try:
        result.steps, result.stopped, result.adapter_step = 20, "early", 10
        text = write_report(run, result).read_text("utf-8")
    finally:
        path.unlink()
    shown = words(text)
    assert "stopped early" in shown and "adapter/ has the weights of step 10, the best evaluation." in shown
    assert "Held-out reward" in shown and "during training, 3 prompts" in shown and "evaluations.jsonl" in text
    assert "3 prompts 1 at step 0, 1.25 at step 20" in text

"""`rloo-kit show`: a run, its completions, several runs; in the terminal, as JSON, and the page that compares runs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit import load_config
from rloo_kit.cli import app
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.results.intervals import Measured
from rloo_kit.results.versus import compare_runs, write_comparison_page
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.rollouts import Rollouts
from tests.evaluations import around
from tests.html_page import Page
from tests.results.test_report import make_rollout

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = {
    "completions/clipped_ratio": 0.1, "frac_score_zero_std": 0.4, "reward_std": 0.4, "entropy": 0.2, "grad_norm": 0.3,
    "clip_ratio/region_mean": 0.0, "rewards/failed_ratio": 0.0, "reward": 0.5,
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(rows, state="finished", overrides=())`: a folder as RunDir writes it, with those rows of metrics."""

    def build(rows: list[dict[str, Any]], state: str = "finished", overrides: tuple[str, ...] = ()) -> Path:
        words = (f"run.output_dir={tmp_path}", "run.name=made", *overrides)
        with RunDir.create(load_config(ROOT / "configs" / "arithmetic_thinking.yaml", *words)) as run_dir:
            run_dir.append_jsonl("metrics.jsonl", [row | {"run": run_dir.id} for row in rows])
            error = {"error": "RewardError: it failed"} if state == "failed" else {}
            run_dir.set_status(state, step=len(rows), max_steps=60, **error)
        return run_dir.folder

    return build


def make_rows(count: int = 12, **changes: Any) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **changes} for step in range(1, count + 1)]


def call(*words: Any) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `rloo-kit show words`."""
    result = CliRunner().invoke(app, ["show", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def call_json(*words: Any) -> tuple[int, Any]:
    code, printed, errors = call(*words, "--json")
    assert printed, errors
    return code, json.loads(printed)


# -------------------------------------------------------------------------------------------------- one run


def test_a_healthy_run_is_exit_code_0(make_run: Callable[..., Path], monkeypatch: Any) -> None:
    """A level that is always alarming is soon ignored. On a machine without a browser what is printed is the report:
    it fits into 80 columns, curves included."""
    times = {"time/rollout_s": 9.1, "time/reward_s": 0.3, "time/gradient_s": 2.4, "time/tokens_per_s": 540.0}
    rows = make_rows(50, **times)
    folder = make_run([row | {"reward": 0.01 * row["step"], "seconds": 12.3 * row["step"]} for row in rows])
    code, found = call_json(folder)
    assert found["means"]["time/rollout_s"] == pytest.approx(9.1)
    assert code == 0 and found["level"] == "healthy" and found["actions"] == found["health"] == []
    write_evaluation(folder, 20, name="before")
    write_evaluation(folder, 80)
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(folder)[1].splitlines()
    assert max(map(len, lines)) <= 80 and any(re.match("Reward.*▁.*█", line) for line in lines)
    assert not any(line.startswith("Entropy") for line in lines), "a flat curve says nothing"
    assert "A step takes 12.3 s: rollout 9.1 s (74 %), rewards 0.3 s (2 %)," in " ".join(map(str.strip, lines))


def test_what_was_wrong_only_at_the_start_is_forgotten(make_run: Callable[..., Path]) -> None:
    """A run that found its signal after ten tied steps is fine now."""
    rows = make_rows(10, frac_score_zero_std=1.0, reward_std=0.0)
    rows += [{"step": step, **HEALTHY} for step in range(11, 25)]
    folder = make_run(rows)
    found = call_json(folder)[1]
    (one,) = found["health"]
    assert (found["level"], one["rule"], one["holds"]) == ("healthy", "no_signal", False)
    assert "(over after step 10)" in " ".join(call(folder)[1].split())
    code, found = call_json(make_run(rows[:10], "finished", ("run.name=again",)))
    (one,) = found["health"]
    assert (code, one["rule"], one["since"], one["holds"]) == (1, "no_signal", 1, True)
    assert found["level"] == "alarming" and "data.source" in found["actions"][0]
    assert found["verdict"]["kind"] == "no signal"


def test_a_failed_run_and_one_without_metrics(make_run: Callable[..., Path]) -> None:
    """An agent that polls has to distinguish them."""
    code, found = call_json(make_run([], "running"))
    assert code == 0 and found["state"] == "running" and found["level"] is None
    folder = make_run(make_rows(), "failed", ("run.name=second",))
    code, found = call_json(folder)
    assert code == 1 and found["state"] == "failed" and found["error"] == "RewardError: it failed"
    assert "RewardError: it failed" in call(folder)[1] and "A step takes" not in call(folder)[1]


# ---------------------------------------------------------------------------------------------- completions


def make_row(completion: str, ids: list[int], **changes: Any) -> dict[str, Any]:
    """A rollout's row; 260 is the id of the closing tag."""
    closed, prompt = 260 in ids, "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n<think>\n"
    row = {"completion": completion, "completion_ids": ids, "completion_tokens": len(ids), "closed": closed}
    row |= {"thinking_tokens": ids.index(260) if closed else None, "truncated": not closed, "answer_start": None}
    return make_rollout(1, 0) | row | {"prompt": prompt} | changes


def test_thinking_and_answer_are_parted_where_the_row_says(make_run: Callable[..., Path]) -> None:
    """A text that spells the closing tag in ordinary tokens has not closed its thinking, and is not split there."""
    folder = make_run(make_rows(1))
    rows = [
        make_row("one</think>2", [64, 260, 17, 258], answer_start=11),
        make_row("says </think> but goes on", [64, 65, 66, 67]),
        make_row("two</think>and</think>2", [64, 260, 65, 260, 17], answer_start=22, forced=True),
        make_row("just 2", [64, 17, 258], prompt="1+1=", truncated=False),
    ]
    Rollouts(folder).append(rows)
    code, found = call_json(folder, "--completions", "9")
    shown = [(one["thinking"], one["answer"]) for one in found["completions"]]
    expected = [("one", "2"), ("says </think> but goes on", None), ("two</think>and", "2"), (None, "just 2")]
    assert code == 0 and shown == expected
    assert [one["forced"] for one in found["completions"]] == [False, False, True, False]
    printed = call(folder, "--completions", "9")[1]
    assert "closed by the budget" in printed and "<|im_start|>" not in printed and "right answer 9" in printed


def test_the_turns_of_an_episode_are_read_in_order(make_run: Callable[..., Path]) -> None:
    """In the terminal and as JSON; a tool's result may hold what controls a terminal."""
    folder = make_run(make_rows(2, **{"tools/call_frequency": 1.5, "tools/turns": 2.0}))
    made = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    turns = [made, {"role": "tool", "name": "add", "content": "3\x1b[2J"}, {"role": "assistant", "content": "4"}]
    row = make_rollout(1, 0, turns=turns, tool_calls=1, tool_failures=0, cut_by=None)
    Rollouts(folder).append([row, make_rollout(1, 1)])
    _, printed, _ = call(folder, "--completions", 2)
    lines = printed.splitlines()
    place = lines.index("call add(a=1)")
    assert lines[place + 1 : place + 4] == ["result 3\u241b[2J", "sum 0", "0"]
    _, found = call_json(folder, "--completions", 1)
    (one,) = found["completions"]
    assert one["steps"] == [["call", "add(a=1)"], ["result", "3\x1b[2J"]] and one["tool_calls"] == 1
    assert call_json(folder)[1]["means"]["tools/call_frequency"] == 1.5


def test_completions_by_order_and_step(make_run: Callable[..., Path], tmp_path: Path) -> None:
    code, _, errors = call(tmp_path)
    assert code == 2 and "not a run's folder" in errors
    folder = make_run(make_rows(2))
    rows = [make_row(f"text {n}", [64] * n, step=step, reward=float(n)) for step in (1, 2) for n in (2, 3, 1)]
    Rollouts(folder).append(rows)
    for order, expected in {"best": [3, 2], "worst": [1, 2], "longest": [3, 2], "first": [2, 3]}.items():
        found = call_json(folder, "--completions", "2", "--order", order)[1]
        assert found["step"] == 2 and [one["reward"] for one in found["completions"]] == expected, order
    assert call_json(folder, "--step", "1")[1]["step"] == 1
    code, _, errors = call(folder, "--step", "9")
    assert code == 2 and "no rollout of step 9; it has steps 1 to 2" in errors
    code, _, errors = call(folder, "--completions", "1", "--order", "odd")
    assert code == 2 and "first, best, worst, longest" in errors


def test_long_texts_lose_their_middle_and_controls_are_pictured(make_run: Callable[..., Path]) -> None:
    """Ten thousand tokens of thinking fill an agent's context; an escape sequence can control a terminal."""
    folder = make_run(make_rows(1))
    Rollouts(folder).append([make_row("\x1b[31m\u202e\u2067" + "x" * 5000, [64])])
    thinking = call_json(folder, "--completions", "1", "--max-chars", "100")[1]["completions"][0]["thinking"]
    assert len(thinking) < 150 and "4,907 characters left out" in thinking
    assert not {*"\x1b\u202e\u2067"} & {*call(folder, "--completions", "1")[1]}


# ---------------------------------------------------------------------------------------------- several runs


def measure(right: int) -> Measured:
    """Of `right` of 100 prompts."""
    return around(right / 100, shares=[1.0] * right + [0.0] * (100 - right))


def write_evaluation(folder: Path, right: int, digest: str = "same", name: str = "after", **changes: Any) -> None:
    """Write after.json with `right` of 100 prompts right; measures given by name come on top of the accuracy."""
    measures = {"accuracy": measure(right)} | changes.pop("measures", {})
    found = Evaluation("after", 100, 1, 1.0, 48, measures, prompts_digest=digest)
    RunDir(folder).write_json(f"{name}.json", found.to_dict() | changes)


def test_two_runs_are_compared(make_run: Callable[..., Path]) -> None:
    """A difference is given with its interval and the keys that differ; one within the interval counts as none. Where
    they do not compare, training rewards do not take the place: they would compare prompts."""
    a = make_run(make_rows())
    b = make_run(make_rows(), "finished", ("run.name=b", "rloo.learning_rate=0.01", "model.lora.r=8"))
    write_evaluation(a, 50)
    assert "b cannot be compared with made: one was not evaluated" in call_json(a, b)[1]["sentence"]
    write_evaluation(b, 80, temperature=0.5)
    assert "measured differently (temperature 1 and 0.5)" in call_json(a, b)[1]["sentence"]
    write_evaluation(b, 80, digest="other")
    assert "measured on different prompts" in call_json(a, b)[1]["sentence"]
    for right, words in (
        (52, "b and made do not differ significantly"),
        (20, "made is ahead of b: accuracy +30 points, 95 % CI"),
        (80, "b is ahead of made: accuracy +30 points, 95 % CI"),
    ):
        write_evaluation(b, right)
        code, found = call_json(a, b)
        assert code == 0 and found["sentence"].startswith(words)
    first, second = found["runs"]
    assert second["lead"]["low"] < second["lead"]["value"] < second["lead"]["high"]
    assert second["changed"] == {"model.lora.r": [16, 8], "rloo.learning_rate": [0.002, 0.01]}
    assert (first["after"]["accuracy"][0], second["after"]["accuracy"][0]) == (0.5, 0.8)
    printed = " ".join(call(a, b)[1].split())
    assert words in printed and "rloo.learning_rate 0.002 -> 0.01" in printed


def test_three_runs_and_names_that_are_alike(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """`sweep[a]` and `sweep[b]` were both shown as `sweep`, because brackets are rich's markup."""
    a = make_run(make_rows())
    write_evaluation(a, 50)
    others = [shutil.copytree(a, tmp_path / f"sweep[{letter}]:smile:" / "made") for letter in "ab"]
    write_evaluation(others[0], 80)
    found = call_json(a, *others)[1]
    assert [one["name"] for one in found["runs"]][1:] == ["sweep[a]:smile:/made", "sweep[b]:smile:/made"]
    assert "sweep[a]:smile:/made is ahead of" in found["sentence"] and "sweep[b]:smile:/made and" in found["sentence"]
    assert "sweep[a]:smile:" in call(a, *others)[1]


def test_runs_that_are_judged_differently_are_not_ranked(make_run: Callable[..., Path]) -> None:
    """A run with an own reward was "98 points behind" an equal one: its accuracy was exact match."""
    most = {"reward": measure(98)}
    by_sentence: dict[str, Any] = {"judged_by": "exact match", "measures": most | {"rewards/sentence": measure(98)}}
    a, b = make_run(make_rows()), make_run(make_rows(), "finished", ("run.name=b", "rewards.0.params={find: boxed}"))
    write_evaluation(a, 98, judged_by="answer_reward", measures=most | {"rewards/answer_reward": measure(98)})
    write_evaluation(b, 0, **by_sentence)
    code, found = call_json(a, b)
    assert code == 0 and "98 points" not in found["sentence"] and "cannot be compared with made" in found["sentence"]
    assert "not of one kind (answer_reward and exact match) and their rewards differ" in found["sentence"]
    assert found["runs"][1]["lead"] is None and found["runs"][1]["after"]["reward"][0] == 0.98
    write_evaluation(a, 0, **by_sentence)
    c = make_run(make_rows(), "finished", ("run.name=c",))
    write_evaluation(c, 0, **by_sentence)
    found = call_json(a, c)[1]
    assert found["runs"][1]["lead"]["measure"] == "reward" and "do not differ significantly" in found["sentence"]
    assert "reward before" in " ".join(call(a, c)[1].split())


def test_runs_with_an_edited_reward_are_not_ranked_by_it(make_run: Callable[..., Path]) -> None:
    """A reward of one name that paid more after an edit was "ahead: reward +0.50"."""
    a, b = make_run(make_rows()), make_run(make_rows(), "finished", ("run.name=b",))
    for run, right in ((a, 10), (b, 90)):
        measures = {"reward": measure(right), "rewards/exact": measure(98)}
        write_evaluation(run, 10, judged_by="exact match", measures=measures, sources=f"digest {right}")
    sentence = call_json(a, b)[1]["sentence"]
    assert "ahead" not in sentence and "without the rewards, which were edited" in sentence


# ---------------------------------------------------------------------------------------------- their page


@pytest.fixture
def two_runs(make_run: Callable[..., Path]) -> list[Path]:
    """Two runs with a rising reward, 40 and 80 of 100 prompts right."""
    rows = [row | {"reward": row["step"] / 30} for row in make_rows(30)]
    folders = [make_run(rows), make_run(rows, "finished", ("run.name=<b>other<_b>", "rloo.learning_rate=0.01"))]
    for folder, right in zip(folders, (40, 80), strict=True):
        write_evaluation(folder, 10, name="before")
        write_evaluation(folder, right)
    return folders


def report(*words: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_runs_side_by_side(two_runs: list[Path], tmp_path: Path) -> None:
    """Without links a comparison is a dead end, and a curve without a name cannot be attributed to a run."""
    (two_runs[1] / "report.html").write_text("a report")
    page = write_comparison_page(compare_runs(two_runs), tmp_path / "pages" / "comparison.html")
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert "is ahead of made: accuracy +40 points" in parsed.text
    assert "<b>other" not in text and re.search(r'href="\.\./[^"]*report\.html"', text)
    assert text.count("report.html") == 1, "the first has none"
    assert text.count("<svg") == 2, "held-out accuracy and reward; a flat entropy says nothing"
    assert re.search(r'aria-label="Reward: made 0\.0333 at step 1, 1 at step 30;', text)
    assert "rloo.learning_rate" in parsed.text and "0.01" in parsed.text
    assert not re.findall(r"(?:src|href)=[\"']https?:|@import|url\((?!#)", text)


def test_a_page_replaces_only_a_page(two_runs: list[Path], tmp_path: Path) -> None:
    """`report A B --output data.jsonl` replaced the training data by a page."""
    (tmp_path / "data.jsonl").write_text("precious")
    for path in (tmp_path / "data.jsonl", tmp_path, Path("/dev/null")):
        done = report(*two_runs, "--output", path)
        assert done.exit_code == 2 and f"{path} exists and is not a comparison of runs" in done.output
    assert (tmp_path / "data.jsonl").read_text() == "precious"
    for _ in range(2):
        done = report(*two_runs)
        assert done.exit_code == 0 and "is ahead of" in done.stdout and (tmp_path / "comparison.html").is_file()
    for words in ([*two_runs, "rloo.beta=0"], [two_runs[0], "--output", "x.html"], ["rloo.beta=0"]):
        refused = report(*words)
        assert refused.exit_code == 2 and "rloo-kit:" in refused.stderr, words

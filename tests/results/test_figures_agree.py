"""One short run, and every figure that stands on two surfaces: printed lines, `show`, report, comparison, batch,
notebook and files, against a recomputation from `rollouts.jsonl` and `metrics.jsonl` that shares nothing with the
kit."""

import json
import math
import re
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.html_page import Page

STEPS, ENDS = 22, 5  # enough for smoothed curves, whose ends are means of so many steps
CONFIG = """
run: {{name: one, output_dir: {place}, progress_every_s: 0, sample_every_steps: 0}}
model: {{name: {model}, lora: {{r: 2, alpha: 2, target_modules: [q_proj, v_proj]}}, max_seq_length: 128}}
data: {{source: {place}/prompts.jsonl, test_size: 4, max_prompt_length: 64}}
rewards: [{{name: "{place}/own.py:by_ids"}}, {{name: length_reward}}]
rloo: {{max_steps: {steps}, learning_rate: 5e-2, per_device_train_batch_size: 8, num_generations: 2,
  max_completion_length: 6, beta: 0.0}}
eval: {{num_completions: 1, num_samples: 2, every_steps: 11, every_prompts: 2}}
"""
REWARD = "def by_ids(completion_ids, **_):\n    return [float(sum(ids) % 3 == 0) for ids in completion_ids]\n"


def call(*words: Any) -> str:
    from rloo_kit.cli import app

    result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "110"})
    assert result.exit_code in (0, 1), result.output  # `show` exits with 1 where the level is alarming
    return result.stdout


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page_text(path: Path) -> str:
    return " ".join(
        " ".join(text for tag, text in Page(path.read_text()).texts if tag not in ("script", "style")).split()
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Any:
    """`folder`, `printed` by train, and the surfaces as text; `steps`: figures of each step, from its completions."""
    place = tmp_path_factory.mktemp("figures")
    rows = [{"prompt": f"add {n}", "answer": str(n)} for n in range(20)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "own.py").write_text(REWARD)
    (place / "one.yaml").write_text(CONFIG.format(place=place, model=tiny_folder, steps=STEPS))
    printed = call("train", place / "one.yaml")
    folder, other = place / "one", place / "two"
    shutil.copytree(folder, other)
    call("report", folder, other, "--output", place / "comparison.html")
    groups: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in read(folder / "rollouts.jsonl"):
        groups[row["step"]][row["group"]].append(row)
    steps = []
    for row in read(folder / "metrics.jsonl"):
        mine = groups[row["step"]]
        flat = [one for group in mine.values() for one in group]
        tokens = sum(len(one["completion_ids"]) for one in flat)
        steps.append({
            "reward": fmean(one["reward"] for one in flat),
            "by_ids": fmean(float(sum(one["completion_ids"]) % 3 == 0) for one in flat),
            "closed": fmean(260 in one["completion_ids"] for one in flat),
            "signal": fmean(len({one["reward"] for one in group}) > 1 for group in mine.values()),
            "truncated": fmean(one["truncated"] for one in flat),
            "tokens": tokens, "length": tokens / len(flat), "speed": tokens / row["step_time"],
            "thinking": fmean(one["thinking_tokens"] if one["closed"] else len(one["completion_ids"]) for one in flat),
        })  # fmt: skip
    from rloo_kit import load_config, plot_training
    from rloo_kit.results.result import load_result

    return SimpleNamespace(
        folder=folder, other=other, printed=printed, steps=steps, rows=read(folder / "metrics.jsonl"),
        show=call("show", folder), report=page_text(folder / "report.html"), runs=page_text(place / "comparison.html"),
        notebook=plot_training(load_result(load_config(folder / "config.yaml"))).summary,
        status=json.loads((folder / "status.json").read_text()),
    )  # fmt: skip


def mean_ends(run: Any, name: str, form: str) -> tuple[str, str]:
    values = [one[name] for one in run.steps]
    means = [fmean(part) for part in (values[:ENDS], values[-ENDS:])]
    return tuple(f"{one:,.0f}" if one >= 1000 else format(one, form) for one in means)  # type: ignore[return-value]


def shares(ends: tuple[str, str]) -> tuple[str, str]:
    return tuple(one.replace("%", " %") for one in ends)  # type: ignore[return-value]


def in_show(run: Any) -> dict[str, tuple[str, str]]:
    found = re.findall(r"^(\S.*?) +[▁-█]+ +(\S+(?: %)?) +(\S+(?: %)?)$", run.show, flags=re.MULTILINE)
    return {title: (first, last) for title, first, last in found}


def test_curves_start_and_end_alike(run: Any) -> None:
    """`show` had single steps where the report has means of five, the share of tied groups where the report has those
    with signal, and completions a second as "tokens per second": 452 where the report said 6,420. A run with a reward
    of its own had its weighted sum drawn as "Reward: length_reward"."""
    expected = {
        "Reward, weighted sum": mean_ends(run, "reward", ".3g"), "Reward: by_ids": mean_ends(run, "by_ids", ".3g"),
        "Groups with signal": shares(mean_ends(run, "signal", ".1%")),
        "Tokens, completion": mean_ends(run, "length", ".1f"), "Tokens, thinking": mean_ends(run, "thinking", ".1f"),
        "Thinking closed": shares(mean_ends(run, "closed", ".1%")),
        "Truncated at the limit": shares(mean_ends(run, "truncated", ".1%")),
        "Tokens per second": mean_ends(run, "speed", ".1f"),
    }  # fmt: skip
    shown = in_show(run)
    assert {title: shown.get(title) for title in expected} == expected
    for title, ends in expected.items():
        if title != "Tokens, completion":  # the report writes the ends of the second line
            assert f"{title.removesuffix(', thinking')} {' → '.join(ends)}" in run.report, title
    assert "Groups with signal" in run.runs and "without signal" not in run.show + run.report + run.runs
    length, reward = (
        " -> ".join(mean_ends(run, name, form)) for name, form in (("thinking", ".1f"), ("reward", ".3f"))
    )
    assert f"thinking tokens {length}" in run.notebook and f"reward {reward}" in run.notebook


def test_progress_lines_say_what_the_files_say(run: Any) -> None:
    """The line counted tokens by the clock, saving and logging included, and the report by the time of the steps."""
    found = re.findall(r"^step (\d+)/22 \| reward (\S+) \|.*? think (\d+) \| (\d+) tok/s", run.printed, re.MULTILINE)
    wanted = [
        (str(number), f"{one['reward']:.3f}", f"{one['thinking']:.0f}", f"{one['speed']:.0f}")
        for number, one in enumerate(run.steps, 1)
    ]
    assert found == wanted
    for one, row in zip(run.steps, run.rows, strict=True):
        names = {"reward": "reward", "length": "completions/mean_length", "thinking": "thinking/mean_length"}
        names |= {"truncated": "completions/clipped_ratio", "closed": "thinking/closed_ratio"}
        assert {key: row[name] for key, name in names.items()} == pytest.approx({key: one[key] for key in names})
        assert 1 - row["frac_score_zero_std"] == pytest.approx(one["signal"])


def test_time_tokens_and_memory_are_the_same_everywhere(run: Any) -> None:
    """The training time of the report was 0.1 s above that of `show`, which ends with the last logged row."""
    seconds = run.status["seconds"]
    assert run.rows[-1]["seconds"] <= seconds < run.rows[-1]["seconds"] + 5
    whole = f"{seconds:.1f} s" if seconds < 59.5 else f"{round(seconds) // 60} min {round(seconds) % 60} s"
    assert f"training time {whole}" in run.report and f"22 {whole}" in run.runs
    assert f"{round(seconds) // 60}:{round(seconds) % 60:02d} of training" in run.show
    assert f"22 steps, {seconds:.0f} s of training" in run.printed
    compared = json.loads(call("show", run.folder, run.other, "--json"))["runs"]
    assert [one["seconds"] for one in compared] == [seconds] * 2
    assert f"tokens generated {sum(one['tokens'] for one in run.steps):,}" in run.report
    call("report", run.folder)
    assert page_text(run.folder / "report.html") == run.report, "rebuilt from the folder"
    memory = json.loads((run.folder / "memory.json").read_text())
    printed = " ".join(run.printed.split())
    assert f"planned {memory['planned_gib']:.2f} GiB" in printed
    assert f"measured peak {memory['measured_gib']:.2f} GiB ({memory['ratio']:.2f})" in printed


def test_held_out_figures_are_the_same_everywhere(run: Any) -> None:
    """Printed by `train`, in `show`, in the report's table and in the table of a batch."""
    from rloo_kit.batch.comparison import read_figures
    from rloo_kit.runs.run_dir import RunDir

    figures = read_figures(RunDir(run.folder))
    assert figures["steps"] == run.status["step"] == STEPS
    assert figures["reward_last"] == pytest.approx(run.steps[-1]["reward"])
    for when in ("before", "after"):
        found = json.loads((run.folder / f"{when}.json").read_text())
        reward, accuracy = (fmean(found["measures"][name]["per_prompt"]) for name in ("reward", "accuracy"))
        assert math.isclose(figures[f"held_out_reward_{when}"], reward)
        assert math.isclose(figures[f"accuracy_{when}"], accuracy)
        name, place = "reward, weighted sum", {"before": 0, "after": 1}[when]
        rows = re.search(rf"^{name} +(.*)$", run.show, re.MULTILINE)
        assert rows and re.findall(r"(\S+) \[", rows[1])[place] == f"{reward:.3f}"
        assert re.search(rf"{name}( \S+ \[[^]]*\]){{{place}}} {re.escape(f'{reward:.3f}')} \[", run.report)
        assert accuracy == 0 and "exact match" not in run.show, "left out where it says nothing"
        assert f"Evaluation {when}: reward {reward:.3f}" in " ".join(run.printed.split()), "the run's own reward leads"


def test_a_step_in_show_is_that_step_in_the_metrics(run: Any) -> None:
    """`show --completions` counted tied groups by prompt and with unscored completions, a forced close as closed."""
    shown = json.loads(call("show", run.folder, "--step", STEPS, "--completions", 1, "--json"))
    names = {"mean_reward": "reward", "mean_tokens": "length", "truncated_share": "truncated", "closed_share": "closed"}
    names |= {"groups_with_signal_share": "signal"}
    last = run.steps[-1]
    assert {name: shown[name] for name in names} == pytest.approx({name: last[key] for name, key in names.items()})

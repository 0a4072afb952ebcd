"""What a run prints, writes and measures: lines, throttle, tables, metrics, and its peak next to its plan."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rloo_kit import load_config
from rloo_kit.loop import callbacks
from rloo_kit.loop.callbacks import MetricsWriter, RolloutLog
from rloo_kit.loop.metrics import kl_share, kl_spread_ratio
from rloo_kit.plan import parts
from rloo_kit.plan.parts import rollout_gib
from rloo_kit.plan.planner import read_workload
from rloo_kit.plan.vram_plan import Machine
from rloo_kit.runs.files import write_json
from rloo_kit.runs.folder import RunDir
from rloo_kit.training.live import ProgressLine, SampleTable
from rloo_kit.training.memory_watch import MemoryWatch

NAN, GIB = float("nan"), 2**30
THINKING = Path(__file__).resolve().parents[2] / "configs" / "qwen3_4b_thinking_12gb.yaml"
GPU = Machine("RTX 3060", 11.2, 0.8, True)
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n"
LOGS = {"loss": 0.0, "reward": 0.25, "rewards/answer_reward/mean": 0.5, "thinking/mean_length": 41.0}


@pytest.fixture
def clock(monkeypatch):
    """`clock.now` is what the callbacks take for the time, in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def rollouts(tmp_path):
    return RolloutLog(RunDir(tmp_path))


def state(step, max_steps=20):
    return SimpleNamespace(global_step=step, max_steps=max_steps, is_world_process_zero=True)


@pytest.fixture
def begin(tmp_path):
    """`begin(every_s)`: a progress line as a run has it, behind the writer of its rows; `after_s` is its evaluation."""

    def build(every_s, step=0, after_s=0.0):
        line = ProgressLine(MetricsWriter(RunDir(tmp_path)), every_s, after_s)
        line.on_train_begin(None, state(step), None)
        return line

    return build


def log(line, step, logs):
    for callback in (line.writer, line):
        callback.on_log(None, state(step), None, logs=logs)


def row(ids, **changes):
    values = {"step": 0, "prompt": PROMPT.format("1+2="), "completion_ids": ids, "completion_tokens": len(ids)}
    return values | {"reward": 1.0, "advantage": 0.5, "truncated": False, "answer_start": None} | changes


def test_progress_is_throttled_but_never_misses_the_first_and_the_last(begin, clock, capsys):
    """nbclient keeps every flush as a separate output: a line per step makes a notebook of megabytes."""
    line = begin(every_s=5.0)
    for step in range(1, 21):
        clock.now += 1
        log(line, step, LOGS)
    log(line, 20, {"train_runtime": 1.0})
    line.on_train_end(None, state(20), None)
    steps = [text.split("|")[0].strip() for text in capsys.readouterr().out.splitlines()]
    assert steps == ["step 1/20", "step 6/20", "step 11/20", "step 16/20", "step 20/20"]


def test_progress_keeps_what_the_last_rollout_said(begin, clock, capsys):
    """With num_iterations=2 every second step logs no reward, and half of the lines said nothing."""
    line = begin(every_s=0.0)
    for step, logs in enumerate([LOGS, {"loss": 0.1}, LOGS | {"reward": None}], start=1):
        clock.now += 1
        log(line, step, logs)
    first, second, third = capsys.readouterr().out.splitlines()
    assert "reward 0.250 | accuracy 0.500 | think 41" in second and second.startswith("step 2/20")
    assert "reward" in first and "reward" not in third.replace("accuracy", "")


def test_eta_of_a_resumed_run_counts_its_own_steps(begin, clock, capsys):
    """Divided by all steps, those of yesterday included, the time left came out far too short."""
    line = begin(every_s=0.0, step=10)
    clock.now += 60
    log(line, 11, LOGS)
    assert "eta 9:00" in capsys.readouterr().out


def test_eta_leaves_the_first_step_out_and_counts_evaluations(begin, clock, capsys):
    """Kernels are compiled in it: 30 s instead of 10. Evaluations of 25 s come every 5 steps, and one of 40 s after."""
    line = begin(every_s=0.0, after_s=40.0)
    left_s = lambda step, last: 25.0 * (last // 5 - step // 5)  # noqa: E731
    line.evaluations = SimpleNamespace(seconds=25.0, seconds_left=left_s, history=SimpleNamespace(value=None))
    clock.now += 25  # before the first step
    for step in range(1, 21):
        clock.now += 30 if step == 1 else 9.0 + step % 3
        if step % 5 == 0:
            clock.now += 25
            line.evaluations.seconds += 25
        log(line, step, LOGS)
        ends = clock.now + sum(9.0 + later % 3 for later in range(step + 1, 21)) + left_s(step, 20) + 40
        minutes, seconds = capsys.readouterr().out.split("eta ")[1].split(":")
        assert step < 3 or abs(60 * int(minutes) + int(seconds) - (ends - clock.now)) < 0.2 * (ends - clock.now)


def test_sample_table_shows_thinking_and_answer_apart(rollouts, capsys):
    """A completion with rich's markup raised; one that moves the cursor drew over the table."""
    thought = "scratch[/bold]\r\x1b[2K</think>"
    rollouts(
        [
            row([1], completion=f"{thought}[red]3", answer_start=len(thought), reward=None),
            row([1], completion="same prompt", forced=True),
            row([1], completion="endless", forced=True, prompt=PROMPT.format("5+5="), truncated=True, advantage=-0.25),
        ]
    )
    table = SampleTable(rollouts, every_steps=10, num_samples=2)
    for step in (1, 2, 9, 10, 11):
        table.on_log(None, state(step), None, logs=LOGS)
    printed = capsys.readouterr().out
    assert printed.count("Completions of step") == 2 and "step 1" in printed and "step 10" in printed
    assert "scratch[/bold]\u240d\u241b[2K" in printed and "[red]3" in printed and "not scored" in printed
    assert printed.count("closed by the budget") == 2, "once in each of the two tables"
    assert "cut off" in printed and "adv. -0.25" in printed
    assert "same prompt" not in printed, "one completion of each prompt before a second one"
    assert "im_start" not in printed and "assistant" not in printed and "5+5=" in printed
    assert max(map(len, printed.splitlines())) <= 100, "a wider table wraps in the middle of its frame"


def test_sample_table_shows_calls_shortly(rollouts, capsys, monkeypatch):
    """The ids hold the tools' results: decoded, they were the model's answer. A result of 256 tokens fills no table."""
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    turns = [{"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "name": "add", "content": "3" * 500}, {"role": "assistant", "content": "done"}]
    monkeypatch.setenv("COLUMNS", "120")
    rollouts([row([1], completion="so</think>done", answer_start=10, turns=turns), row([1], completion="x")])
    SampleTable(rollouts, every_steps=1, num_samples=1).on_log(None, state(1), None, logs=LOGS)
    printed = capsys.readouterr().out
    assert "calls" in printed and "add(a=1, b=2)" in printed and "-> 333" in printed and "done" in printed
    assert "hm" not in printed and printed.count("3") < 100


# -------------------------------------------------------------------------------------------------------------- metrics


def test_what_the_penalty_weighs_next_to_the_reward():
    """Signs must not cancel, costs alike for all are no penalty, and a ratio of 0/0 is not known."""
    tensor, scores, tied = torch.tensor, torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.ones(4)
    assert kl_share(tensor([3.0, -3.0]), tensor([0.5, 0.5]), beta=0.1) == pytest.approx(0.3 / 0.8)
    assert kl_share(tensor([3.0, 9.0]), tensor([1.0, NAN]), beta=1.0) == pytest.approx(0.75)
    assert kl_share(torch.zeros(2), torch.zeros(2), beta=1.0) == 0.0
    assert math.isnan(kl_share(torch.ones(2), tensor([NAN, NAN]), beta=1.0))
    assert kl_spread_ratio(tensor([100.0, 100.0, 7.0, 7.0]), scores, 0.05, 2) == 0.0
    unlike = tensor([0.0, 40.0, 7.0, 7.0])
    assert kl_spread_ratio(unlike, scores, 0.05, 2) == pytest.approx(1.0)
    assert kl_spread_ratio(unlike, tensor([0.0, 1.0, 1.0, NAN]), 0.05, 2) == pytest.approx(2.0)
    assert kl_spread_ratio(tensor([1.0, 2.0, 1.0, 1.0]), tied, 0.1, 2) == math.inf
    assert kl_spread_ratio(tied, tied, 0.1, 2) is kl_spread_ratio(tied, tensor([1.0, NAN, NAN, NAN]), 0.1, 2) is None


# --------------------------------------------------------------------------------------------------------------- memory


def watch_of(machine: Machine, rows: int = 8) -> MemoryWatch:
    load = replace(read_workload(load_config(THINKING), machine), tokens_per_pass=1)
    return MemoryWatch(load, machine, rows)


def folder_of(path):
    return SimpleNamespace(write_json=lambda name, value: write_json(path / name, value))


def sampled(prompt: int, *completions: int) -> list[dict[str, int]]:
    return [{"prompt_tokens": prompt, "completion_tokens": tokens} for tokens in completions]


def test_the_peak_on_a_gpu_is_compared_at_the_lengths_of_the_run(monkeypatch, tmp_path, capsys):
    """Against the plan of full completions every run looks fine; the run that proves the plan wrong has short ones."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    calls = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: calls.append("reset"),
        max_memory_allocated=lambda: int(6.0 * GIB),
        max_memory_reserved=lambda: int(7.5 * GIB),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    watch = watch_of(GPU)
    watch.start()
    watch(sampled(100, 900, 2000))
    watch(sampled(112, 50))
    watch.report(folder_of(tmp_path))
    seen = replace(watch.load, prompt_tokens=112, completion_tokens=2000)
    computed, planned = rollout_gib(seen, 8), rollout_gib(watch.load, 8)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert calls == ["reset"] and found["measured_gib"] == 6.7 and found["spare_gib"] == 1.5, "with CUDA's context"
    assert found["computed_gib"] == pytest.approx(computed, abs=0.001) and found["row_tokens"] == 2112
    assert found["planned_gib"] == pytest.approx(planned, abs=0.001) and found["part"] == "rollout"
    line = " ".join(capsys.readouterr().out.split())
    assert f"planned {planned:.2f} GiB" in line and "measured peak 6.70 GiB" in line
    assert f"({6.7 / computed:.2f})" in line


def test_a_run_on_the_cpu_is_measured_by_what_it_added(monkeypatch, tmp_path, capsys):
    """A notebook that holds a dataset of 20 GiB would double every plan of its machine."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    ballast = torch.ones(2**25)
    watch = watch_of(Machine("the CPU", 16.0, 0.3, False), rows=1)
    watch.start()
    torch.ones(2**27).sum()
    watch(sampled(100, 200))
    watch.report(folder_of(tmp_path))
    found = json.loads((tmp_path / "memory.json").read_text())
    there = parts.CONTEXT_GIB * GIB + parts.body_bytes(watch.load) + parts.table_bytes(watch.load)
    there += parts.FLOAT * parts.trained_weights(watch.load)
    assert found["measured_gib"] == pytest.approx(there / GIB + 0.5, abs=0.1) and ballast is not None
    assert "measured peak" in " ".join(capsys.readouterr().out.split())

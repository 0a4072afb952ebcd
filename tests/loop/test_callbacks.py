"""What a run prints and writes, on a trainer that is only its state: lines, throttle, tables, signals."""

from types import SimpleNamespace

import pytest

from rloo_kit.loop import callbacks
from rloo_kit.loop.callbacks import MetricsWriter, ProgressLine, RolloutLog, SampleTable
from rloo_kit.runs.folder import RunDir
from rloo_kit.think_tags import ThinkTags

TAGS = ThinkTags(start_id=259, end_id=260)
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
    return values | {"reward": 1.0, "advantage": 0.5, "truncated": False} | changes


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


def test_sample_table_shows_thinking_and_answer_apart(rollouts, tiny_tokenizer, capsys):
    """Markup of rich in a completion, [/bold] for one, must not be taken for markup: it raises. A completion that
    moves the cursor (a model may write any byte) must not draw over the table."""

    def ids(text):
        return tiny_tokenizer(text)["input_ids"]

    rollouts(
        [
            row(ids("scratch[/bold]\r\x1b[2K</think>[red]3"), reward=None),
            row(ids("same prompt"), forced=True),
            row(ids("endless"), forced=True, prompt=PROMPT.format("5+5="), truncated=True, advantage=-0.25),
        ]
    )
    table = SampleTable(rollouts, tiny_tokenizer, TAGS, every_steps=10, num_samples=2)
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

"""Pass rates of training prompts, the prompts selected by them, and whether RLOO has a signal."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from rloo_kit.completion import Completion
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RewardSection
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evals import difficulty
from rloo_kit.evals.difficulty import Signal, measure_signal, select_prompts
from rloo_kit.runs.files import read_object
from rloo_kit.runs.folder import RunDir
from rloo_kit.runs.rollouts import read_rollouts
from tests.rollout.models import make_policy

THINK_END, TURN_END, SEVEN, EIGHT = 260, 258, 22, 23


@pytest.fixture
def policy(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Any:
    """Closes its thinking at once and answers 7 or 8, both about half of the time."""
    bias = dict.fromkeys((SEVEN, EIGHT, THINK_END, TURN_END), 20.0)
    return make_policy(make_tiny_model(tie_word_embeddings=False), tiny_tokenizer, bias)


def make_run(**rollout: Any) -> RunConfig:
    return RunConfig(
        model={"name": "my-model", "family": "thinking"},
        data={"source": "embedded/addition", "num_prompts": 40, "test_size": 4},
        rewards=[{"name": "answer_reward", "weight": 0.5}],
        rloo={"max_steps": 1, "max_completion_length": 4, "per_device_train_batch_size": 4, "num_generations": 4,
              "gradient_accumulation_steps": 1},
        run={"progress_every_s": 0},
        rollout={"difficulty_samples": 4, "rows": 4} | rollout,
    )  # fmt: skip


def make_dataset(answers: list[str | None]) -> Any:
    prompts = [f"<|im_start|>user\n{n}+1=<|im_end|>\n" for n in range(len(answers))]
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": answers})


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The prompts of each call that sampled; the answers come from ANSWERS, not from the model."""
    calls: list[list[str]] = []

    def generate(
        policy: Any, rows: list[Any], limits: Any, *, num_samples: int, on_batch: Any, **_: Any
    ) -> list[Completion]:
        prompts = [row["prompt"] for row in rows]
        calls.append(prompts)
        found = []
        for prompt in prompts:
            rights = RIGHT.get(prompt.partition("user\n")[2].partition("+")[0], 0)
            for sample in range(num_samples):
                answer = SEVEN if sample < rights else EIGHT
                text = f"</think>{'7' if sample < rights else '8'}"
                found.append(Completion([THINK_END, answer, TURN_END], text, True))
        on_batch(len(found), len(found))
        return found

    monkeypatch.setattr(difficulty, "generate_completions", generate)
    return calls


RIGHT = {"0": 0, "1": 1, "2": 2, "3": 4, "4": 3, "5": 4}  # of 4 completions; the other prompts are never solved


def test_prompts_solved_always_or_never_are_skipped(policy, folder, sampled, capsys):
    """If half of the groups have no learning signal, half of the run's time is wasted."""
    dataset = make_dataset(["7"] * 7)
    chosen = select_prompts(make_run(), policy, dataset, folder)
    assert chosen["prompt"] == [dataset[row]["prompt"] for row in (1, 2, 4)]
    assert chosen.column_names == dataset.column_names
    line = capsys.readouterr().out
    assert [len(prompts) for prompts in sampled] == [4, 3], "4 batches of 4 rows at once"
    assert "of 7 training prompts, 2 have a pass rate of at most 0" in line and "2 of at least 1" in line
    assert "4 completions each: 3 are trained on" in line
    narrower = select_prompts(make_run(min_pass_rate=0.25, max_pass_rate=0.75), policy, dataset, folder)
    assert narrower["prompt"] == [dataset[2]["prompt"]], "both ends are skipped"
    off = make_run(difficulty_samples=0)
    assert select_prompts(off, policy, dataset, folder) is dataset
    del sampled[:]
    select_prompts(make_run(), policy, make_dataset(["7"] * 3).select([0, 1, 1, 0, 2]), folder)
    assert [len(prompts) for prompts in sampled] == [3], "equal prompts are measured once"


def test_pass_rates_are_sampled_under_the_runs_limits(policy, folder, monkeypatch):
    """A budget was left out, so prompts were measured with more thinking than they are trained with."""
    limits: list[Any] = []
    monkeypatch.setattr(difficulty, "generate_completions", lambda policy, rows, given, **_: limits.append(given) or [])
    monkeypatch.setattr(difficulty, "open_tools", lambda *_: None)
    run = make_run()
    run.rloo.tools, run.rloo.max_completion_length, run.rloo.thinking_budget = ["tools.py:add"], 20, 5
    with suppress(Exception):  # nothing was sampled
        select_prompts(run, policy, make_dataset(["7"] * 7), folder)
    assert (limits[0].thinking_budget, limits[0].max_completion_length) == (5, 20)


def test_prompts_without_an_answer_are_kept(policy, folder, sampled, capsys):
    """Rows of another task have no reference answer; counted as never solved, all of them would be skipped."""
    dataset = make_dataset(["7", None, "7", None, "7"])
    chosen = select_prompts(make_run(), policy, dataset, folder)
    assert chosen["prompt"] == [dataset[row]["prompt"] for row in (1, 2, 3, 4)]
    assert sampled == [[dataset[row]["prompt"] for row in (0, 2, 4)]]
    assert "of 3 training prompts with an answer, 1 have" in capsys.readouterr().out


def test_a_resumed_run_trains_on_what_it_chose(policy, folder, sampled):
    """A resume that measures or selects again would continue with another order of prompts."""
    dataset = make_dataset(["7"] * 7)
    first = select_prompts(make_run(), policy, dataset, folder)
    del sampled[:]
    folder.resumed = True
    again = select_prompts(make_run(difficulty_samples=8), policy, dataset, folder)
    assert again["prompt"] == first["prompt"] and sampled == []
    assert read_object(folder / "prompts.json")["kept"] == [1, 2, 4]
    folder.resumes_from = SimpleNamespace(step=1)
    fewer = select_prompts(make_run(), policy, make_dataset(["7"] * 3), folder)
    assert fewer["prompt"] == first["prompt"][:2] and read_object(folder / "prompts.json")["kept"] == [1, 2]


def test_too_few_prompts_are_refused_with_the_numbers(policy, folder, sampled):
    """A run on the two remaining prompts would overfit, and one on none would train nothing, both silently."""
    with pytest.raises(DataError, match=r"of 2 training .*1 have .* 1 of at .*: 0 are left, and a rollout takes 1"):
        select_prompts(make_run(), policy, make_dataset(["7"] * 7).select([0, 3]), folder)
    assert not (folder / "prompts.json").exists()
    run = make_run()
    run.rloo.gradient_accumulation_steps = 4
    with pytest.raises(DataError, match=r"3 are left, and a rollout takes 4\. .*rollout\.difficulty_samples=0"):
        select_prompts(run, policy, make_dataset(["7"] * 7), folder)


@pytest.mark.slow
def test_training_takes_the_chosen_prompts(start, tmp_path, sampled):
    """Through `train`: skipped prompts are never sampled in training, and a resume continues with the same prompts."""
    rows = tmp_path / "data.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(8)))
    words = [f"data.source={rows}", "rollout.difficulty_samples=4", "rollout.rows=4", "rloo.num_generations=2"]
    words += ["data.test_size=0", "rewards=[{name: answer_reward}]", "rloo.per_device_train_batch_size=2"]
    result = start("rloo.max_steps=2", *words)
    assert result.steps == 2
    trained = {row["prompt"] for row in read_rollouts(result.folder)}
    kept = {prompt for prompt in trained if any(f"\n{number}+1=" in prompt for number in (1, 2, 4))}
    assert trained == kept and len(trained) >= 2
    calls = len(sampled)
    assert start("rloo.max_steps=3", *words, resume=True).steps == 3 and len(sampled) == calls


# ------------------------------------------------------------------------------------------------ the signal


@pytest.mark.parametrize(
    ("rates", "verdict", "word"),
    [
        ([0.0] * 9 + [0.5], "too low", "sft.max_steps"),
        ([0.0] * 8 + [0.5, 0.125], "enough", "enough signal for RLOO"),
        ([1.0] * 9 + [0.875], "too easy", "data.source"),
        ([0.0] * 10, "too low", "sft.source"),
    ],
)
def test_the_verdict(rates: list[float], verdict: str, word: str) -> None:
    """A prompt that is always solved gives as little signal as one that never is; the mean shows neither."""
    signal = Signal(rates, 8)
    assert signal.verdict == verdict and word in str(signal)
    assert signal.num_mixed == sum(rate not in (0.0, 1.0) for rate in rates)
    assert signal.share.low <= signal.num_mixed / 10 <= signal.share.high


def test_it_samples_as_rloo_does(policy: Any) -> None:
    """The policy sometimes answers 7 or 8: a prompt is sometimes solved if that is the answer, and else never."""
    run = make_run(difficulty_samples=0)
    run.rloo.per_device_train_batch_size = run.rloo.num_generations = 32
    data = SimpleNamespace(train=make_dataset(["7", "9", None, "8", "7"]))
    signal = measure_signal(run, policy, data, 3)
    assert signal is not None and signal.num_generations == run.rloo.num_generations == 32
    assert len(signal.rates) == 3 and signal.rates[1] == 0.0, "the row without an answer is passed over"
    assert signal.num_mixed == 2
    assert run.rollout.difficulty_samples == 0, "the run is asked, not changed"
    assert measure_signal(run, policy, SimpleNamespace(train=make_dataset([None, None])), 3) is None


def test_without_a_reward_that_compares_answers_there_is_no_pass_rate(policy: Any, folder: Any) -> None:
    """Judged by exact match, an SFT whose own reward had reached 98 % needed "a higher sft.learning_rate"."""
    run, train = make_run(), make_dataset(["0"] * 3)
    run.rewards = [RewardSection(name="length_reward")]
    assert measure_signal(run, policy, SimpleNamespace(train=train), 3) is None
    with pytest.raises(ConfigError, match="rollout.difficulty_samples=0"):
        select_prompts(run, policy, train, folder)
    with pytest.raises(ConfigError, match=r"no column 'answer' .*data\.answer_column.*rollout\.difficulty_samples=0"):
        select_prompts(make_run(), policy, train.remove_columns("answer"), folder)

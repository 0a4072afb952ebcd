"""Held-out accuracy: what counts as right, what is measured alongside, and how two evaluations compare."""

import copy
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import datasets
import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.data.load import load_data
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evals import evaluate as answer_judge
from rloo_kit.evals.difficulty import measure_pass_rates
from rloo_kit.evals.evaluate import evaluate
from rloo_kit.results.changes import change_of, compare
from rloo_kit.results.evaluation import Evaluation, setting_differences
from rloo_kit.results.intervals import wilson
from rloo_kit.results.samples import list_steps
from rloo_kit.rewarding.registry import build_rewards, make_rewards
from rloo_kit.rewards import AnswerReward
from rloo_kit.rollout import completions
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.thinking_budget import make_budget_limits
from rloo_kit.think_tags import split_thinking
from rloo_kit.training.held_out import choose_measure
from tests.episodes import Scripted, call, with_tools
from tests.rollout import models

THINK_END, TURN_END, END_OF_TEXT = 260, 258, 256
NUM_PROMPTS = 12


@pytest.fixture
def make_policy(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Callable[..., Any]:
    """`make_policy(family, bias={id: b})`: a random Qwen3 whose head leans towards some ids."""

    def build(family: str = "thinking", bias: dict[int, float] | None = None, seed: int = 0, **config: Any) -> Any:
        return models.make_policy(
            make_tiny_model(seed, tie_word_embeddings=False, **config), tiny_tokenizer, bias or {}, family
        )

    return build


@pytest.fixture
def make_run() -> Callable[..., RunConfig]:
    """`make_run(rewards=..., **eval)`: completions of at most 6 tokens."""

    def build(rewards: list[dict[str, Any]] | None = None, family: str = "auto", **values: Any) -> RunConfig:
        return RunConfig(
            model={"name": "my-model", "family": family},
            data={"source": "embedded/addition", "num_prompts": 40, "test_size": NUM_PROMPTS},
            rewards=rewards or [{"name": "answer_reward"}],
            rloo={"max_steps": 1, "max_completion_length": 6},
            eval=values,
        )

    return build


def make_dataset(answers: list[str | None] | None = None) -> Any:
    columns = {"prompt": [f"<|im_start|>user\n{n}+1=<|im_end|>\n" for n in range(NUM_PROMPTS)]}
    return datasets.Dataset.from_dict(columns | ({"answer": answers} if answers else {}))


def digits_policy(make_policy: Callable[..., Any], family: str = "thinking") -> Any:
    """Writes digits, sometimes a closing tag or an end; the instruct one's template opens no thinking."""
    bias = dict.fromkeys(range(15, 25), 10.0) | {THINK_END: 11.0 if family == "thinking" else -100.0, TURN_END: 10.0}
    policy = make_policy(family, bias, initializer_range=0.4)
    if family == "instruct":
        policy.tokenizer = copy.deepcopy(policy.tokenizer)
        policy.tokenizer.chat_template = policy.tokenizer.chat_template.replace("<think>\n", "")
    return policy


def answers_of(policy: Any, **options: Any) -> list[str]:
    """The policy's own answers, used as right answers, so that they are right by construction."""
    options = {"limits": 6, "seed": 0} | options
    completions = generate_completions(policy, make_dataset()["prompt"][:], **options)
    opened = policy.family == "thinking"
    return [split_thinking(found.ids, policy.tokenizer, policy.tags, opened)[1] for found in completions]


def test_accuracy_counts_the_right_answers(make_run, make_policy):
    """Right answers are the policy's own for some prompts, impossible for the others: accuracy is known exactly."""
    policy = digits_policy(make_policy, "instruct")
    sampled, greedy = answers_of(policy), answers_of(policy, temperature=0)
    for own in (sampled, greedy):
        gold = [answer if answer and index % 3 else "no such answer" for index, answer in enumerate(own)]
        measured = evaluate(make_run(), policy, make_dataset(gold))
        expected = [float(a != "" and g == a) for a, g in zip(own, gold, strict=True)]
        assert 2 <= sum(expected) <= 8
        assert measured.closed_share is None and measured.mean_thinking_tokens is None, "it never thinks"
        assert [(one["thinking"], one["answer"]) for one in measured.samples] == [("", text) for text in sampled[:10]]
        found = measured.measures["accuracy" if own is sampled else "greedy_accuracy"]
        assert found == replace(wilson(sum(expected) / NUM_PROMPTS, NUM_PROMPTS), per_prompt=expected)


def test_prompts_without_an_answer_are_not_wrong(make_run, make_policy):
    """Counted as wrong, rows of a task without answers kept accuracy below one half."""
    policy = digits_policy(make_policy)
    gold = [answer or "none" for answer in answers_of(policy)]
    options = {"num_samples": 2, "pass_at_k": [2], "thinking_budgets": [2]}
    judged = [index for index in range(NUM_PROMPTS) if index % 3]
    some = [answer if index in judged else None for index, answer in enumerate(gold)]
    whole, part = (evaluate(make_run(**options), policy, make_dataset(each)) for each in (gold, some))
    assert (part.num_prompts, part.measures["accuracy"].count, part.unscored) == (NUM_PROMPTS, len(judged), 0)
    for name in ("accuracy", "greedy_accuracy"):
        shares = [share if place in judged else None for place, share in enumerate(whole.measures[name].per_prompt)]
        assert part.measures[name].per_prompt == shares
        known = [share for share in shares if share is not None]
        assert part.value(name) == sum(known) / len(judged)
    assert part.value("accuracy") > 0
    assert part.pass_at_k[2] == sum(bool(share) for share in part.measures["accuracy"].per_prompt) / len(judged)
    assert part.budgets[0].forced_share == whole.budgets[0].forced_share
    assert [sample["correct"] is None for sample in part.samples] == [index not in judged for index in range(10)]
    assert f"{len(judged)} of {NUM_PROMPTS}" in str(part) and "with an answer" not in str(whole)
    assert Evaluation.from_dict(json.loads(json.dumps(part.to_dict()))) == part
    for before in (part, whole):
        change = compare(before, part).changes["accuracy"]
        assert change.paired and change.difference.count == len(judged) and change.difference.value == 0


def test_without_answers_accuracy_is_none(make_run, make_policy):
    """A run on prompts without answers is valid; an accuracy of 0 would be wrong."""
    run = make_run([{"name": "thinking_reward"}], thinking_budgets=[2], pass_at_k=[1])
    measured = evaluate(run, digits_policy(make_policy), make_dataset())
    assert measured.pass_at_k == {} and not any("accuracy" in name for name in measured.measures)
    assert measured.budgets[0].accuracy is None and measured.budgets[0].forced_share > 0
    assert "not measured: no answers" in str(measured)
    assert measured.closed_share is not None and measured.samples[0]["gold"] is None


def test_answers_that_cannot_be_judged(make_run, make_policy, monkeypatch):
    """math-verify can give up on an answer: that is not right, and the number of such cases is reported."""

    def unsure(**batch: Any) -> list[float | None]:
        return [float("nan"), None, 1.0] * (len(batch["completions"]) // 3)

    monkeypatch.setattr(answer_judge, "build_reward", lambda *_: unsure)
    measured = evaluate(make_run(greedy=False), digits_policy(make_policy), make_dataset(["1"] * NUM_PROMPTS))
    assert measured.value("accuracy") == pytest.approx(1 / 3) and measured.unscored == 8
    assert "could not be judged" in str(measured)


def test_shares_and_lengths(make_run, make_policy):
    """The same numbers, counted by hand from the same completions."""
    policy = digits_policy(make_policy)
    run = make_run(num_samples=3, greedy=False)
    measured = evaluate(run, policy, make_dataset(["1"] * NUM_PROMPTS))
    found = generate_completions(policy, make_dataset()["prompt"][:], 6, num_samples=3, seed=0)
    closed = [completion.ids.index(THINK_END) for completion in found if THINK_END in completion.ids]
    assert 0 < len(closed) < len(found)
    assert measured.closed_share == pytest.approx(len(closed) / len(found))
    thinking = [done.ids.index(THINK_END) if THINK_END in done.ids else len(done.ids) for done in found]
    assert measured.mean_thinking_tokens == pytest.approx(sum(thinking) / len(found))
    truncated = [completion for completion in found if completion.ids[-1] != TURN_END]
    assert measured.truncated_share == pytest.approx(len(truncated) / len(found))
    assert measured.mean_tokens == pytest.approx(sum(len(completion.ids) for completion in found) / len(found))


def test_forced_and_unforced_accuracy_apart(make_run, make_policy):
    """A single accuracy at a budget hides whether the closed completions are the wrong ones."""
    policy = digits_policy(make_policy)
    limits = make_budget_limits(policy.tokenizer, policy.tags, 6, 2, 3)
    found = generate_completions(policy, make_dataset()["prompt"][:], limits)
    gold = answers_of(policy, limits=limits)
    gold = [answer if answer and index % 2 else "no such answer" for index, answer in enumerate(gold)]
    run = make_run(thinking_budgets=[2])
    run.rloo.answer_budget = 3
    measured = evaluate(run, policy, make_dataset(gold))
    (entry,) = measured.budgets
    verdicts = [float(answer != "no such answer") for answer in gold]
    for side, name in ((True, "forced"), (False, "unforced")):
        chosen = [right for right, completion in zip(verdicts, found, strict=True) if bool(completion.forced) is side]
        assert chosen and getattr(entry, name) == wilson(sum(chosen) / len(chosen), len(chosen))
    assert Evaluation.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    assert "accuracy at 2, closed by the budget" in str(measured) and "accuracy at 2, the others" in str(measured)


def test_the_run_is_measured_under_its_own_budget(make_run, make_policy):
    """A run that trains under a budget was measured without one, at its limit: cut off, and wrong."""
    policy, data = digits_policy(make_policy), make_dataset(["1"] * NUM_PROMPTS)
    found = generate_completions(policy, data["prompt"][:], make_budget_limits(policy.tokenizer, policy.tags, 6, 2, 3))
    run = make_run(greedy=False)
    run.rloo.thinking_budget, run.rloo.answer_budget = 2, 3
    measured = evaluate(run, policy, data)
    assert measured.thinking_budget == 2
    assert measured.forced_share == pytest.approx(sum(bool(done.forced) for done in found) / len(found))
    lengths = [done.thinking_tokens for done in found]
    assert max(lengths) == 2 and measured.measures["thinking_tokens"].per_prompt == lengths
    run.eval.max_completion_length = 4
    short = evaluate(run, policy, data)
    assert short.mean_tokens <= 4 < measured.mean_tokens and short.forced_share == measured.forced_share
    without = evaluate(make_run(greedy=False), policy, data)
    assert "thinking budget none and 2" in setting_differences(without, measured)
    assert "closed by the budget of 2" in str(measured) and without.forced_share is None


def test_budgets_need_a_model_that_thinks(make_run, make_policy):
    """Budgets for an instruct model would measure answers after a tag that it has never seen."""
    with pytest.raises(ConfigError, match=r"thinking_budgets is \[4\], but this model does not think"):
        evaluate(make_run(thinking_budgets=[4]), make_policy("instruct"), make_dataset())
    with pytest.raises(ConfigError, match=r"eval.thinking_budgets or data.max_prompt_length"):
        evaluate(make_run(thinking_budgets=[4000], greedy=False), make_policy(), make_dataset())


def test_more_samples_are_kept_for_the_report(make_run, make_policy, monkeypatch):
    """Only ten of a thousand prompts could be read in an evaluation; a file of 100 MB would be no better."""
    monkeypatch.setattr("rloo_kit.evals.evaluate.SHOWN", 2)
    dataset = make_dataset(["1"] * NUM_PROMPTS)
    whole = evaluate(make_run(greedy=False), make_policy(), dataset)
    first = evaluate(make_run(greedy=False, num_prompts=5), make_policy(), dataset)
    assert first.num_prompts == 5 and first.prompt_digests == whole.prompt_digests[:5], "the same before and after"
    assert len(whole.samples) == 2 and len(whole.more_samples) == NUM_PROMPTS - 2
    assert [one["prompt"] for one in [*whole.samples, *whole.more_samples]] == list(dataset["prompt"])
    monkeypatch.setattr("rloo_kit.evals.evaluate.SAMPLE_CHARS", len(whole.more_samples[0]["prompt"]) + 200)
    few = evaluate(make_run(greedy=False), make_policy(), dataset)
    assert 1 <= len(few.more_samples) < NUM_PROMPTS - 2


def test_nothing_to_evaluate_on(make_run, make_policy):
    """Without held-out prompts, the mean was a division by zero."""
    with pytest.raises(DataError, match="no held-out prompts to evaluate on; set data.test_size above 0"):
        evaluate(make_run(), make_policy(), make_dataset().select([]))


REWARDS = [{"name": "length_reward", "weight": 0.5}, {"name": "thinking_reward", "weight": 2.0}]


def test_held_out_reward_is_that_of_training(make_run, make_policy):
    """A run with custom rewards had "no accuracy to compare": weighted sum and each reward, as means over prompts."""
    run, policy = make_run(REWARDS, num_samples=4), digits_policy(make_policy)
    found = evaluate(run, policy, make_dataset())
    completions = generate_completions(policy, make_dataset()["prompt"][:], 6, num_samples=4, seed=0)
    batch = {"completions": [one.text for one in completions], "completion_ids": [one.ids for one in completions]}
    values = {reward.__name__: reward(**batch) for reward in build_rewards(run, policy.tokenizer)}
    for name, numbers in values.items():
        entry = found.rewards[name]
        assert entry.value == pytest.approx(sum(numbers) / len(numbers)) and entry.low <= entry.value <= entry.high
        assert entry.per_prompt == pytest.approx([sum(numbers[at : at + 4]) / 4 for at in range(0, len(numbers), 4)])
    sums = [0.5 * a + 2.0 * b for a, b in zip(values["length_reward"], values["thinking_reward"], strict=True)]
    reward = found.measures["reward"]
    assert reward.value == pytest.approx(sum(sums) / len(sums)) and reward.low < reward.value < reward.high
    assert "accuracy" not in found.measures and found.reward_unscored == 0
    assert "reward, weighted sum" in str(found) and "reward length_reward" in str(found)
    same = compare(found, found).changes["reward"].difference
    assert same.value == 0 and same.low < 0 < same.high and same.count == 12


def test_rewards_are_called_as_training_calls_them(make_run, make_policy):
    """A reward that reads a column, the forced flag or the state failed in evaluation, not in a rollout."""
    calls = []

    def watching(prompts, completions, completion_ids, **columns):
        calls.append((prompts, completions, completion_ids, columns))
        columns["log_metric"]("length", 1.0)
        columns["log_extra"]("answer", completions)
        return [float(len(ids)) for ids in completion_ids]

    data = make_dataset(["1"] * NUM_PROMPTS).add_column("level", list(range(NUM_PROMPTS)))
    run, policy = make_run(num_samples=2, greedy=False), digits_policy(make_policy)
    run.rloo.thinking_budget, run.rloo.max_steps, run.rloo.per_device_train_batch_size = 4, 9, 8
    found = evaluate(run, policy, data, reward_funcs=[watching])
    assert [len(prompts) for prompts, *_ in calls] == [8, 8, 8], "as many at once as one process has of a rollout"
    prompts, completions, ids, columns = calls[1]
    assert prompts == [text for text in data["prompt"][4:8] for _ in range(2)]
    assert columns["level"] == [4, 4, 5, 5, 6, 6, 7, 7] and columns["answer"] == ["1"] * 8
    assert len(columns["thinking_forced"]) == 8 and "prompt" not in columns
    assert any(forced for *_, its in calls for forced in its["thinking_forced"]), "the run's budget is the evaluation's"
    assert completions == [policy.tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    assert (columns["trainer_state"].global_step, columns["trainer_state"].max_steps) == (9, 9)
    assert found.value("reward") == found.rewards["watching"].value == pytest.approx(found.mean_tokens)
    run.rloo.thinking_budget = None
    evaluate(run, policy, data, reward_funcs=[watching])
    assert "thinking_forced" not in calls[-1][3]


def test_a_reward_that_fails_leaves_its_samples_out(make_run, make_policy, capsys):
    """A failed reward is not a reward of 0, which would look like a worse policy. None means that it does not apply."""

    def sometimes(completion_ids, level, **_):
        if 3 in level:
            raise ValueError("no level 3")
        return [None if at % 4 == 0 else 1.0 + at for at in level]

    def plain(completion_ids, **_):
        return [1.0] * len(completion_ids)

    data = make_dataset().add_column("level", list(range(NUM_PROMPTS)))
    found = evaluate(make_run(), digits_policy(make_policy), data, reward_funcs=[sometimes, plain])
    assert found.reward_unscored == 1 and found.measures["reward"].per_prompt[:5] == [1.0, 3.0, 4.0, None, 1.0]
    assert found.rewards["sometimes"].per_prompt[:5] == [None, 2.0, 3.0, None, None]
    assert found.rewards["plain"].value == 1.0
    assert "without a reward, excluded from its mean" in str(found)
    assert "ValueError: no level 3 (8% of the held-out completions have no reward)" in capsys.readouterr().out
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


# ------------------------------------------------------------------------------------------ rewards of ones own


def sentence(completions, answer, **_):
    """1 for the answer anywhere in the completion."""
    return [float(str(gold) in text) for text, gold in zip(completions, answer, strict=True)]


def test_an_own_reward_leads_and_exact_match_is_called_that(make_run, make_policy):
    """Judged by a reward that the run did not have, right sentences were wrong in the table and each sample."""
    policy = digits_policy(make_policy)
    rows = make_dataset(["7"] * NUM_PROMPTS)
    run = make_run([{"name": "length_reward"}])
    measured = evaluate(run, policy, rows, reward_funcs=[sentence])
    assert (measured.judged_by, measured.leading) == ("exact match", "reward")
    reward = measured.measures["reward"]
    assert 0 < reward.value == measured.rewards["sentence"].value != measured.value("accuracy")
    greedy = generate_completions(policy, rows["prompt"][:], limits=6, temperature=0, seed=0)
    expected = [float("7" in one.text) for one in greedy]
    assert measured.measures["greedy_reward"].per_prompt == expected and 0 < sum(expected) < NUM_PROMPTS
    samples = [*measured.samples, *measured.more_samples]
    assert [one["reward"] for one in samples] == reward.per_prompt
    assert {one["correct"] for one in samples} == {None}
    same = evaluate(make_run([{"name": "length_reward"}], temperature=0), policy, rows, reward_funcs=[sentence])
    assert same.value("greedy_reward") == same.value("reward") == measured.value("greedy_reward")


def test_an_answer_reward_made_in_python_judges_with_its_own_settings(make_run, make_policy):
    """It was passed to `train` and logged as answer_reward, while held-out answers were judged with the defaults."""
    policy = make_policy(bias={22: 9.0, 28: 9.0, THINK_END: 9.0, TURN_END: 9.0})
    rows = make_dataset(["7"] * NUM_PROMPTS)
    run = make_run([{"name": "length_reward"}], greedy=False, num_samples=8)
    own = AnswerReward(think_end_id=THINK_END, find="last_number")
    measured = evaluate(run, policy, rows, reward_funcs=[own])
    assert (measured.judged_by, measured.leading) == ("answer_reward", "accuracy")
    assert 0 < measured.value("accuracy") == measured.value("reward") and "greedy_reward" not in measured.measures
    configured = make_run([{"name": "answer_reward", "params": {"find": "last_number"}}], greedy=False, num_samples=8)
    assert evaluate(configured, policy, rows).value("accuracy") == measured.value("accuracy")


def test_an_answer_reward_of_weight_0_measures_and_decides_nothing(make_run, make_policy):
    """Added to select prompts by difficulty, it decided the verdict and which weights were kept."""
    policy, rows = digits_policy(make_policy), make_dataset(["7"] * NUM_PROMPTS)
    for weight, leading in ((0.0, "reward"), (0.1, "accuracy")):
        run = make_run([{"name": "length_reward"}, {"name": "answer_reward", "weight": weight}], greedy=False)
        measured = evaluate(run, policy, rows)
        assert (measured.judged_by, measured.leading) == ("answer_reward", leading)
        assert choose_measure(run, rows, make_rewards(run, policy.tokenizer)) == leading
        assert measured.value("accuracy") is not None


@pytest.mark.parametrize("gold", [{"sum": 7, "steps": ["1+6"]}, [7, 8], True, "7 because 1+6 = 7 #### 7"])
def test_an_answer_column_of_any_form_reaches_the_reward(gold, make_run, make_policy, tiny_tokenizer):
    """A list was refused, and text with its working was 0 % right."""
    rows = [{"prompt": f"{n}+1=", "answer": gold} for n in range(20)]
    run = make_run([{"name": "length_reward"}], greedy=False)
    data = load_data(run, tiny_tokenizer, rows=rows)
    seen = []

    def own(completions, answer, **_):
        seen.extend(answer)
        return [0.5] * len(completions)

    measured = evaluate(run, make_policy(), data.test, reward_funcs=[own])
    assert seen == data.test["answer"][:] and all(one == gold for one in seen)
    is_text = isinstance(gold, str)
    assert ("accuracy" in measured.measures, measured.judged_by) == (is_text, "exact match" if is_text else None)
    assert measured.leading == "reward" and measured.samples[0]["gold"] == seen[0]
    if not is_text:
        with pytest.raises(DataError, match="it must be text or a number"):
            load_data(make_run(), tiny_tokenizer, rows=rows)


def test_a_reward_file_that_was_edited_in_between_is_not_compared(
    make_policy: Callable[..., Any], make_run: Callable[..., RunConfig], tmp_path: Any
) -> None:
    """A notebook trained for hours while its reward's file was edited: the same policy was "reward +0.30" better."""
    file = tmp_path / "own.py"
    run, policy = make_run([{"name": f"{file}:score"}]), digits_policy(make_policy)
    found = []
    for pay in ("1.0", "9.0", "1.0"):
        file.write_text(f"def score(completions):\n    return [{pay}] * len(completions)\n")
        found.append(evaluate(run, policy, make_dataset(["1"] * NUM_PROMPTS)))
    first, edited, again = found
    assert (first.value("reward"), edited.value("reward")) == (1.0, 9.0)
    assert first.sources == again.sources != edited.sources
    assert change_of("reward", first, edited) is None and change_of("reward", first, again).difference.value == 0.0


def test_progress_counts_all_passes_and_says_when_it_ends(make_run, make_policy, monkeypatch, capsys):
    """The greedy pass counted from 0 again, and no line said how long an evaluation of ten minutes still takes."""
    clock = itertools.count()
    monkeypatch.setattr(answer_judge.time, "monotonic", lambda: next(clock))
    run = make_run(num_samples=2, batch_size=4, thinking_budgets=[2])
    run.run.progress_every_s = 0.0
    evaluate(run, digits_policy(make_policy), make_dataset(["1"] * NUM_PROMPTS), label="before")
    line = re.compile(r"evaluation before: (\d+)/48 completions \((.*)\) \| eta 0:(\d\d)")
    printed = capsys.readouterr().out
    assert not re.search(r" [1-4]/48 .*eta", printed), "one of 400 completions ended first: 2:41:49, it took 2:30"
    found = [(int(done), what, int(left)) for done, what, left in line.findall(printed)]
    assert [done for done, *_ in found] == sorted({done for done, *_ in found}) and found[-1][0] < 48
    assert list(dict.fromkeys(what for _, what, _ in found)) == ["sampled", "greedy", "budget 2"]
    assert found[0][2] > found[-1][2]


# ------------------------------------------------------------------------------------------------ episodes


COUNTER = '''
class Counter:
    def reset(self, start, **row):
        self.total = start

    def add(self, a: int) -> int:
        """Add to the total.

        Args:
            a: what to add.
        """
        if a > 99:
            raise ValueError("too much")
        self.total += a
        return self.total

    def get_reward(self):
        return float(self.total)


def ended_at(environments, completion_mask, turns, **_):
    return [one.total + (0 in mask) / 2 + len(turns) / 100
            for one, mask, turns in zip(environments, completion_mask, turns, strict=True)]
'''


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """The file of the environment: one, so that its process is started once."""
    file = tmp_path_factory.mktemp("environment") / "counter.py"
    file.write_text(COUNTER)
    return file


@pytest.fixture
def episodes(make_policy, tiny_tokenizer, counter, monkeypatch):
    """`episodes(script, **eval)`: a run with an environment, a scripted policy, three rows; 7 is right."""

    def build(script: list[list[str]], **values: Any) -> tuple[RunConfig, Any, Any]:
        tokenizer = with_tools(tiny_tokenizer)
        policy = models.make_policy(make_policy().model, tokenizer, {}, "thinking")
        monkeypatch.setattr(completions, "build_engine", lambda *_, **__: Scripted(tokenizer, script))
        run = RunConfig(
            model={"name": "my-model"},
            data={"source": "embedded/addition", "num_prompts": 40, "test_size": NUM_PROMPTS},
            rewards=[{"name": "answer_reward"}, {"name": f"{counter}:ended_at"}],
            rloo={"max_steps": 1, "max_completion_length": 400, "environment": f"{counter}:Counter"}
            | {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 1},
            eval=values,
        )
        prompt = ["<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\n"] * 3
        return run, policy, datasets.Dataset.from_dict({"prompt": prompt, "answer": ["7"] * 3, "start": [0, 100, 200]})

    return build


def test_an_episode_is_judged_by_its_last_turn_and_its_own_environment(episodes, capsys):
    """Rewards run in chunks: taken from the front each time, the first environments would be everybody's."""
    script = [
        [call("add", a=7), "so</think>7"],
        [call("add", a=1), call("add", a=2), "</think>8"],
        [call("add", a=100), "</think>7"],
        [call("take"), "</think>7"],
        ["</think>7"],
        ["</think>8"],
    ]
    run, policy, dataset = episodes(script, num_samples=2, greedy=False)
    measured = evaluate(run, policy, dataset)
    assert measured.measures["accuracy"].per_prompt == [0.5, 1.0, 0.5]
    assert measured.measures["rewards/Counter"].per_prompt == [(7 + 3) / 2, 100.0, 200.0]
    extra = [0.5 + 0.03, 0.5 + 0.05, 0.5 + 0.03, 0.5 + 0.03, 0.01, 0.01]
    means = [(a + b) / 2 for a, b in zip([7, 100, 200], [3, 100, 200], strict=True)]
    means = [mean + (extra[2 * n] + extra[2 * n + 1]) / 2 for n, mean in enumerate(means)]
    assert measured.measures["rewards/ended_at"].per_prompt == pytest.approx(means)
    shares = {"failure_frequency": 1 / 5, "invalid_frequency": 1 / 5}
    assert measured.tools == shares | {"call_frequency": 5 / 6, "turns": pytest.approx(11 / 6)}
    assert "WARNING: tool add: ValueError: too much" in capsys.readouterr().out
    first = measured.samples[0]
    assert (first["thinking"], first["answer"]) == ("so", "7")
    assert list_steps(first["turns"]) == [("call", "add(a=7)"), ("result", "7")]
    own = len(policy.tokenizer(script[0][0])["input_ids"]) + len(policy.tokenizer(script[0][1])["input_ids"]) + 2
    assert first["tokens"] == own, "the result is not the model's"
    text = str(measured)
    assert "tool calls per completion" in text and "0.83" in text and "0.83 tool calls" in measured.describe()
    assert "tools" not in replace(measured, tools={}).to_dict()


def test_pass_rates_of_episodes_are_by_what_starts_them(episodes):
    """All rows of an environment may have one prompt: the first row's rate was all rows'."""
    run, policy, dataset = episodes([["</think>7"], ["</think>7"], ["</think>7"], ["</think>8"], ["</think>8"], [""]])
    found = measure_pass_rates(run, policy, dataset, dataset["answer"][:], 2)
    assert found == [1.0, 0.5, 0.0]

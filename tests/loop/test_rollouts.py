"""Rollouts in the trainer and in runs: what a sampler's gap weighs, budgets, a prompt that opens the thinking."""

import copy
from functools import partial

import pytest
import torch

import rewards
import rloo_kit as kit
from rloo_kit.errors import DataError
from rloo_kit.loop.collaborators import PromptReservoir
from rloo_kit.preflight.trial_steps import make_trainer as make_steps
from rloo_kit.results.samples import split_completion
from rloo_kit.rollout.completions import generate_completions
from rloo_kit.rollout.engine import Engine
from rloo_kit.runs.rollouts import read_rollouts
from rloo_kit.system import environment
from rloo_kit.think_tags import opens_thinking
from tests.loop.conftest import assert_same, by_ids, weights
from tests.rollout.models import shake, teacher_forced


@pytest.fixture
def make_batches(make_trainer):
    """`make_batches(reward, **options)`: two groups a step by the kit's own engine, without a KL penalty."""
    defaults = {"max_completion_length": 12, "per_device_train_batch_size": 8, "max_steps": 1, "beta": 0.0}

    def build(reward, prompts=8, **options):
        trainer = make_trainer(reward, prompts=prompts, **defaults | options)
        trainer.rows = []
        trainer.rollout_listeners.append(trainer.rows.extend)
        return trainer

    return build


@pytest.fixture
def start_long(start):
    """The loop's `start`, with room for an answer."""
    words = ("rloo.max_steps=2", "rloo.max_completion_length=8", "run.sample_every_steps=1")
    return partial(start, *words)


def first_id(completion_ids, **_):
    return [float(ids[0]) for ids in completion_ids]


@pytest.fixture
def corrected_gradient(make_batches):
    """A step's gradient and log where the sampler's log-probabilities are lower by `shift`, one or one a row."""

    def run(form, shift, **options):
        shifts = shift if isinstance(shift, list) else [shift] * 8
        torch.manual_seed(0)
        trainer = make_batches(first_id, sampler_correction=form, max_grad_norm=0.0, **options)
        sample, close, kept = trainer.rloo.sampler.engine.sample, trainer._close_step, []

        def shifted(*arguments, **named):
            rollout = sample(*arguments, **named)
            rows = zip(rollout.sampler_logps, shifts, strict=True)
            logps = [[p - by for p in row] for row, by in rows]
            return type(rollout)(rollout.completion_ids, rollout.forced, logps, rollout.context)

        def keep():
            close()
            kept.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]))

        trainer.rloo.sampler.engine.sample, trainer._close_step = shifted, keep
        trainer.train()
        return kept[0], trainer.state.log_history[0], trainer.rows

    return run


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_the_correction_weighs_gradients_by_the_gap(form, corrected_gradient):
    """A sampler that is off by a factor biases every step; the weight that corrects it is cut off at the cap."""
    plain, logs, _ = corrected_gradient("none", 10.0)
    assert logs["sampling/logp_difference_mean"] == pytest.approx(10.0, abs=1e-3)
    weighed, logs, _ = corrected_gradient(form, 10.0)
    assert logs["sampling/importance_weight_mean"] == pytest.approx(2.0)
    assert torch.allclose(weighed, 2.0 * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["token_mask", "sequence_mask"])
def test_a_masked_correction_drops_a_completion_alone(form, corrected_gradient):
    """Its siblings go on being compared with it: the advantages stay, and only its own part leaves the gradient."""
    plain, _, _ = corrected_gradient("none", 0.0)
    alone, rest = 5, [row for row in range(8) if row != 5]
    without, logs, rows = corrected_gradient(form, [10.0 * (row == alone) for row in range(8)])
    only, _, others = corrected_gradient(form, [10.0 * (row != alone) for row in range(8)])
    assert [row["advantage"] for row in rows] == [row["advantage"] for row in others]
    assert rows[alone]["advantage"] != 0 and without.any() and only.any()
    assert torch.allclose(without + only, plain, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(without, plain, rtol=1e-3, atol=1e-6)
    lengths = [len(row["completion_ids"]) for row in rows]
    kept = sum(lengths[row] for row in rest) / sum(lengths)
    assert logs["sampling/importance_weight_mean"] == pytest.approx(kept, abs=1e-4)


def test_a_forced_close_is_seen_by_rewards_and_kept(start_long, capsys):
    """A random model never closes its thinking: with a budget each completion has an answer that is scored."""
    seen = []

    def watch(completion_ids, thinking_forced, **columns):
        assert "prompt" not in columns and len(thinking_forced) == len(completion_ids)
        seen.append(list(thinking_forced))
        return [float(sum(ids) % 5) for ids in completion_ids]

    form = rewards.think_format_reward.with_(think_end_id=260, eos_token_ids=(258, 256))
    budget = ("rloo.thinking_budget=3", "rloo.answer_budget=4")
    answer = rewards.answer_reward.with_(think_end_id=260)
    result = start_long(*budget, rewards=[watch, form, answer])
    rows = list(read_rollouts(result.folder))
    assert [row["forced"] for row in rows] == [flag for batch in seen for flag in batch]
    assert sum(row["forced"] for row in rows) > len(rows) / 2
    for row in rows:
        if not row["forced"]:
            continue
        assert row["completion_ids"][3] == 260 and row["thinking_tokens"] == 3 and row["closed"]
        assert len(row["completion_ids"]) <= 8 and row["rewards"]["think_format_reward"] == 0.0
        assert set(row["columns"]) == {"answer", "question"}, "the flag is no column of the data"
    for metrics in result.metrics:
        step = [row for row in rows if row["step"] == metrics["step"]]
        assert metrics["thinking/forced_ratio"] == pytest.approx(sum(row["forced"] for row in step) / len(step))
        assert metrics["thinking/forced_accuracy"] == pytest.approx(
            sum(row["rewards"]["answer_reward"] for row in step if row["forced"]) / sum(row["forced"] for row in step)
        )
    assert "closed by the budget" in capsys.readouterr().out, "in the table of samples"


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_accepted_filters_are_corrected_and_logged(engine, make_trainer, capsys):
    """The weight of each token is the share that the filter kept, and the gap is in the log."""
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "max_completion_length": 6, "rollout_engine": engine}
    steps = {}
    for correction in ("auto", "none"):
        trainer = make_trainer(
            [by_ids], accept_truncated_sampling=True, top_k=20, sampler_correction=correction, beta=0.0, **options
        )
        assert "truncated sampling: top_p=1, top_k=20" in capsys.readouterr().out
        trainer.train()
        (steps[correction],) = [logs for logs in trainer.state.log_history if "loss" in logs]
    for step in steps.values():  # of 264 tokens of a random model 20 have a tenth of the probability, or less
        assert step["sampling/logp_difference_mean"] > 1
    assert 0 < steps["auto"]["sampling/importance_weight_mean"] < 0.3
    assert "sampling/importance_weight_mean" not in steps["none"]
    assert 0 < steps["auto"]["grad_norm"] < 0.3 * steps["none"]["grad_norm"]


# ------------------------------------------------------------------------------------- a prompt that opens the thinking


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{{ '' }}"
)


@pytest.fixture
def load(write_config, make_tiny_model, tiny_tokenizer, tmp_path):
    """`load(*overrides)`: a run on the tiny model with that template, its policy and its data."""

    def build(*overrides):
        folder = tmp_path / "model"
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = TEMPLATE
        make_tiny_model().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        run = kit.load_config(write_config(), f"model.name={folder}", *overrides)
        kit.check(run)
        policy = kit.load_policy(run)
        return run, policy, kit.load_data(run, policy.tokenizer)

    return build


@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize(("lora", "engine"), [("model.lora.r=4", "generate"), ("model.lora=null", "native")])
def test_evaluations_sample_in_the_precision_of_training(lora, engine, precision, load, monkeypatch):
    """On a GPU rollouts ran LoRA in bfloat16 and evaluations in float32: not quite the policy that was trained."""
    monkeypatch.setattr(environment, "mixed_precision", lambda dtype: precision)
    run, policy, data = load(lora, f"rollout.engine={engine}")
    shake(policy.model)
    prompts, found = data.train["prompt"][:4], []
    plain = Engine.sample
    monkeypatch.setattr(Engine, "sample", lambda *given, **named: found.append(plain(*given, **named)) or found[-1])

    def evaluate():
        generate_completions(policy, prompts, limits=12, seed=5)

    evaluate()
    with make_steps(policy, run, [by_ids], data.train, changed={"max_completion_length": 12}) as trainer:
        torch.manual_seed(5)
        trainer.rloo.sampler.draw(policy.tokenizer(prompts)["input_ids"])
    evaluate()
    before, training, after = found
    assert before == training == after
    tokens = zip(policy.tokenizer(prompts)["input_ids"], training.completion_ids, strict=True)
    exact = torch.tensor(sum((teacher_forced(policy.model, *one) for one in tokens), []))
    gap = (torch.tensor(sum(training.sampler_logps, [])) - exact).abs().max()
    assert (gap > 1e-4) == (precision == "bf16")


def test_a_thought_that_never_ends_is_no_answer_anywhere(load):
    """An unfinished thought was taken for the answer where the family, not the prompt, decided."""
    run, policy, data = load("rloo.max_steps=1")
    assert policy.family == "hybrid" and all(map(opens_thinking, data.train["prompt"]))
    samples = [sample for sample in kit.evaluate(run, policy, data.test).samples if not sample["closed"]]
    assert samples and all(sample["thinking"] and not sample["answer"] for sample in samples)
    result = kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
    assert all("thinking/closed_ratio" in row for row in result.metrics), "every completion is a thought"
    rows = [row for row in kit.read_rollouts(result.folder) if not row["closed"]]
    assert rows and not any(split_completion(row)[1] for row in rows), "the report's split"
    given = kit.ask(run, policy, "add 3", max_tokens=4)
    assert given.thinking and not given.answer and given.thinking_tokens == given.tokens


# ---- groups without a signal


def some_rows(count):
    return [{"prompt": f"p{number}", "answer": number} for number in range(count)]


def tied_for_even_prompts(prompts, completion_ids, **columns):
    """Equal for every completion of an even prompt; different for nearly every one of an odd prompt."""
    even = [int(answer) % 2 == 0 for answer in columns["answer"]]
    return [0.5 if tied else sum(ids) % 97 / 97 for tied, ids in zip(even, completion_ids, strict=True)]


def names(drawn):
    return [row["prompt"] for row in drawn]


def test_groups_without_a_learning_signal_give_way_to_fresh_prompts(start_long):
    """With enough rounds a batch holds groups that differ and nothing else, each of one prompt, and its own rewards."""
    result = start_long("rollout.resample_rounds=6", "rloo.max_steps=3", rewards=[tied_for_even_prompts])
    rows = list(read_rollouts(result.folder))
    assert len(rows) == 3 * 8
    replaced = [metrics["rollout/resampled_groups"] for metrics in result.metrics]
    assert sum(replaced) > 0, "half of the prompts are tied, so some of the six groups are"
    for start_row in range(0, len(rows), 4):
        group = rows[start_row : start_row + 4]
        assert len({row["prompt"] for row in group}) == 1
        assert int(group[0]["columns"]["answer"]) % 2 == 1, "an even prompt is left"
        for row in group:
            assert row["reward"] == pytest.approx(sum(row["completion_ids"]) % 97 / 97), "another row's reward"
            assert f"add {row['columns']['answer']}<" in row["prompt"]
        assert len({row["reward"] for row in group}) > 1
    for metrics in result.metrics:
        assert metrics["frac_score_zero_std"] == 0.0
        assert metrics["sampling/logp_difference_max"] < 1e-4, "another row's log-probabilities"


def test_rounds_are_a_limit(start_long):
    """Where every prompt is tied, drawing until the batch is full never ends."""
    calls = []

    def always(completion_ids, **_):
        calls.append(len(completion_ids))
        return [1.0] * len(completion_ids)

    result = start_long("rollout.resample_rounds=2", "rloo.max_steps=1", rewards=[always])
    assert calls == [8, 8, 8] and len(list(read_rollouts(result.folder))) == 8
    (logs,) = result.metrics
    assert logs["rollout/resampled_groups"] == 0 and logs["frac_score_zero_std"] == 1.0
    assert 0 <= logs["sampling/logp_difference_mean"] < 1e-5, "a step without any signal has a gap too"


@pytest.mark.slow
def test_a_resumed_run_draws_what_the_whole_one_drew(start_long):
    """Without the reservoir's place in the state a resumed run trains on other prompts than the uncut one."""
    options = ("rollout.resample_rounds=2",)

    def go(steps, *words, **flags):
        return start_long(f"rloo.max_steps={steps}", *options, *words, rewards=[tied_for_even_prompts], **flags)

    whole = go(3, "run.name=whole")
    go(1)
    resumed = go(3, resume=True)
    assert [row["episode"] for row in resumed.metrics] == [8.0, 16.0, 24.0], "of the whole run"
    ids = [[row["completion_ids"] for row in read_rollouts(one.folder)] for one in (resumed, whole)]
    assert ids[0] == ids[1]
    assert_same(weights(resumed.adapter_folder), weights(whole.adapter_folder))


def test_every_prompt_comes_once_a_pass():
    """Drawing with replacement would leave a third of the prompts out of a pass."""
    reservoir = PromptReservoir(some_rows(10), seed=3)
    first = [name for _ in range(5) for name in names(reservoir.draw(2, []))]
    second = [name for _ in range(5) for name in names(reservoir.draw(2, []))]
    assert sorted(first) == sorted(second) == [f"p{n}" for n in range(10)]
    assert first != second, "each pass is reshuffled"
    assert names(PromptReservoir(some_rows(10), seed=3).draw(10, [])) == first
    assert names(PromptReservoir(some_rows(10), seed=4).draw(10, [])) != first
    small = PromptReservoir(some_rows(4), seed=0)
    assert names(small.draw(3, names(some_rows(3)))) == ["p3"], "a loop until there are enough would never end"
    assert small.draw(3, names(some_rows(4))) == []
    repeated = PromptReservoir([{"prompt": "same"}] * 5, seed=0)
    assert len(repeated.draw(3, [])) == 1, "groups of one prompt are one group's worth of news"
    with pytest.raises(DataError, match=r"7 training prompts, and there are 6 now.*data\.\*"):
        PromptReservoir(some_rows(6), seed=1).load_state_dict(PromptReservoir(some_rows(7), seed=1).state_dict())

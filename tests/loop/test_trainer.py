"""The loop through real training runs of a few steps on a tiny random Qwen3."""

import math

import pytest
import torch
from datasets import Dataset

from rloo_kit.errors import DataError, NonFiniteError
from rloo_kit.gradient import packing
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.trainer import RLOOTrainer

THINK_END, EOS = 260, 258


def by_length(completion_ids, **_):
    return [len(ids) / 10 + ids[0] / 100 for ids in completion_ids]


@pytest.fixture
def make_trainer(make_trainer):
    """`make_trainer(rewards, completions=..., **options)`: micro-batches of one group, two of them a step."""
    defaults = {"max_completion_length": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}

    def build(rewards=by_length, completions=None, model=None, lora=True, **options):
        return make_trainer(rewards, completions, model, lora, **defaults | {"max_steps": 2} | options)

    return build


def test_older_metric_names_have_the_values_of_their_formulas(make_trainer):
    """Dashboards of TRL's older trainer stayed empty: the names were known, the numbers were not."""
    trainer = make_trainer(num_iterations=2, max_steps=2, learning_rate=0.05, beta=0.0, gradient_accumulation_steps=1)
    parts, plain = [], trainer.rloo.recorder.step
    trainer.rloo.recorder.step = lambda stats, on_policy: (parts.append(stats), plain(stats, on_policy))
    batches, settle = [], trainer.rloo.settle
    trainer.rloo.settle = lambda batch: (settle(batch), batches.append(batch))
    scored, score = [], trainer.rloo.scorer.score
    trainer.rloo.scorer.score = lambda *rest, **named: (scored.append(score(*rest, **named)), scored[-1])[1]
    trainer.train()
    first, second = (row for row in trainer.state.log_history if "loss/policy_avg" in row)
    old = torch.cat(batches[0].old_logps)
    assert first["policy/approxkl_avg"] == pytest.approx(0.0, abs=1e-9)
    for row, found in zip((first, second), scored[-2:], strict=True):
        logps = found.logps.detach()
        assert row["policy/approxkl_avg"] == pytest.approx((logps - old).square().mean().item() / 2, rel=1e-4, abs=1e-9)
        assert row["objective/entropy"] == pytest.approx(-logps.sum().item() / 4, rel=1e-5)
        assert row["policy/entropy_avg"] == row["entropy"] == pytest.approx(found.entropies.mean().item(), rel=1e-5)
        assert row["policy/clipfrac_avg"] == row["clip_ratio/region_mean"]
        assert row["lr"] == row["learning_rate"] and row["episode"] == 4.0
    assert second["policy/approxkl_avg"] > 1e-6 and second["val/ratio_var"] > 0
    assert [row["loss/policy_avg"] for row in (first, second)] == pytest.approx([one.loss.item() / 4 for one in parts])
    assert not any("val/clipfrac_avg" in row for row in trainer.state.log_history), "there is no value function"


def test_rollout_rows_tell_what_happened(make_trainer):
    """`rollouts/` is where one finds out why a run went wrong; a reward or a length in the wrong row misleads."""
    completions = [[70, THINK_END, 71, EOS], [70, 71, 72, 73, 74, 75], [THINK_END, EOS], [90, EOS]] * 2
    trainer = make_trainer(completions=completions, max_steps=1)
    rows = []
    trainer.rollout_listeners.append(rows.extend)
    trainer.train()
    assert len(rows) == 8
    assert [row["completion_ids"] for row in rows] == completions
    assert [row["thinking_tokens"] for row in rows[:4]] == [1, None, 0, None]
    assert [row["truncated"] for row in rows[:4]] == [False, True, False, False]
    assert [row["rewards"]["by_length"] for row in rows] == pytest.approx(by_length(completions))
    assert [row["group"] for row in rows] == [1] * 4 + [2] * 4
    answers = [row["completion"][row["answer_start"] :] if row["closed"] else None for row in rows[:3]]
    assert answers[1:] == [None, ""] and rows[0]["completion"].endswith(f"</think>{answers[0]}") and answers[0]
    assert rows[1]["answer_start"] is None and not any("forced_chars" in row for row in rows)
    first, *others = [row["reward"] for row in rows[:4]]
    assert rows[0]["advantage"] == pytest.approx(first - sum(others) / 3, abs=1e-5)  # a fresh adapter: KL is 0
    assert rows[0]["prompt"].startswith("<|im_start|>user")
    logs = trainer.state.log_history[0]
    assert logs["thinking/closed_ratio"] == pytest.approx(0.5)
    assert logs["thinking/mean_length"] == pytest.approx((1 + 6 + 0 + 2) / 4)
    assert logs["val/num_eos_tokens"] == 6
    charged = logs["objective/scores"] + logs["objective/non_score_reward"]
    assert logs["objective/rlhf_reward"] == pytest.approx(charged, abs=1e-6)


@pytest.mark.parametrize("form", ["sum", "length_normalized", "per_token"])
def test_kl_forms_reach_the_advantages(form, make_trainer):
    """With equal rewards the advantages are the penalty alone: each form differs as its formula says."""

    def judge(completions, reward, **options):
        trainer, rows = make_trainer(lambda completion_ids, **_: reward, completions, **options), []
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.5)
        trainer.rollout_listeners.append(rows.extend)
        inputs = [{"prompt": trainer.train_dataset[0]["prompt"]} for _ in range(4)]
        trainer.model.train()
        return trainer, trainer.rloo.roll_out(trainer.model, inputs).advantages, [row["kl"] for row in rows]

    completions = [[70, 71, EOS], [70, EOS], [72, 73, 74, 75, 76, EOS], [99, EOS]]
    trainer, advantages, kl = judge(completions, [0.0] * 4, kl_form=form, beta=0.5)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    assert max(abs(value) for value in kl) > 1e-3 and metrics["objective/kl"] != 0.0
    if form == "per_token":
        assert advantages.trained.shape == (13,)
        firsts = [advantages.of([row])[0].item() for row in range(4)]
        assert firsts == pytest.approx([-0.5 * value for value in kl], abs=1e-5)
        assert metrics["objective/non_score_reward"] == pytest.approx(-0.5 * metrics["objective/kl"], rel=1e-4)
        return
    if form == "length_normalized":
        kl = [value / len(ids) for value, ids in zip(kl, completions, strict=True)]
    expected = [-0.5 * (value - (sum(kl) - value) / 3) for value in kl]
    assert advantages.trained.tolist() == pytest.approx(expected, abs=1e-5)
    if form == "sum":
        ends = [[70, EOS], [70, EOS], [70, 70], [70, 70]]
        found = judge(ends, [1.0] * 4, missing_eos_penalty=0.9, beta=0.0)[1].trained.tolist()
        assert found == pytest.approx([0.6, 0.6, -0.6, -0.6], abs=1e-6)
        options = {"normalize_rewards": True, "reward_clip_range": (-1.0, 1.0), "beta": 0.0}
        found = judge([[70, EOS]] * 4, [0.0, 10.0, 20.0, 30.0], **options)[1].trained.tolist()
        z = 15 / (sum((x - 15) ** 2 for x in (0, 10, 20, 30)) / 3) ** 0.5  # the highest score, in deviations
        scores = [-1.0, -z / 3, z / 3, 1.0]
        assert found == pytest.approx([score - (sum(scores) - score) / 3 for score in scores], abs=1e-5)


def test_failures_that_a_run_stands_are_said(make_trainer, caplog, capsys):
    """A reward that failed for a tenth of all samples was seen only in a metric; TRL prints whole completions."""

    def shaky(completion_ids, **_):
        return [1.0, float("inf"), 3.0, 5.0][: len(completion_ids)] * (len(completion_ids) // 4)

    trainer = make_trainer(shaky, [[70, EOS]] * 8, max_steps=4)
    trainer.train()
    captured = capsys.readouterr()
    assert "returned None" not in caplog.text + captured.out + captured.err
    assert trainer.state.log_history[0]["rewards/unscored_ratio"] == 0.25
    said = [line for line in captured.out.splitlines() if line.startswith("WARNING")]
    assert len(said) == 3  # of four failing rollouts the first, second and fourth
    assert "reward 'shaky' failed on sample 1" in said[0] and "it returned inf" in said[0]
    assert "(25% of the samples of this rollout are not scored)" in said[0]


def spoil_reference(trainer, value, rows=slice(1), calls=1):
    """In the first calls of the reference some tokens have `value`."""
    left = [calls]

    def broken(model, groups):
        logps = trainer.rloo.scorer.score(model, groups, need_entropy=False).logps.detach()
        if left[0] > 0:
            logps[rows] = value
        left[0] -= 1
        return logps

    trainer.rloo.scorer.reference = broken


def skipped(trainer):
    return [logs["steps/skipped"] for logs in trainer.state.log_history if "steps/skipped" in logs]


@pytest.mark.parametrize(("form", "memory"), [("sum", "fast"), ("per_token", "balanced"), ("sum", "low")])
def test_an_infinite_kl_token_moves_nothing(form, memory, make_trainer, capsys):
    """A token that the reference rules out gave an infinite advantage and a loss of NaN, or a gradient of 3.4e38."""
    trainer = make_trainer(kl_form=form, beta=0.5, memory=memory, max_steps=2)
    spoil_reference(trainer, -torch.inf)
    seen, plain = [], trainer._close_step
    trainer._close_step = lambda: (plain(), seen.append([p.grad for p in trainer.model.parameters()]))
    trainer.train()
    assert all(gradient is None for gradient in seen[0]), "the step is skipped whole"
    assert any(gradient is not None for gradient in seen[1]), "the next one is not"
    assert "step 1 is skipped: NaN or infinity in the" in capsys.readouterr().out
    assert skipped(trainer) == [1.0, 1.0]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("form", "value"), [("sum", -math.inf), ("length_normalized", math.nan), ("per_token", -math.inf)]
)
def test_a_broken_token_costs_one_step_of_those_that_use_its_rollout(value, form, make_trainer):
    """One infinity in a rollout that four steps use stopped the run; a NaN in its place was left out without a word."""
    trainer = make_trainer(kl_form=form, beta=0.5, num_iterations=4, max_steps=4)
    spoil_reference(trainer, value, calls=9)
    batches, plain = [], trainer.rloo.settle
    trainer.rloo.settle = lambda batch: (plain(batch), batches.append(batch))
    trainer.train()
    assert skipped(trainer) == [1.0] * 4
    made = batches[0].advantages
    assert (made.of([0]) == 0).all() and made.trained.isfinite().all()
    assert (made.of([1, 2, 3]) != 0).any(), "its siblings are compared with each other"


def test_steps_that_stay_broken_stop_the_run_with_a_saved_state(make_trainer, tmp_path):
    """A policy that has blown up trained on nothing for the rest of the night."""
    trainer = make_trainer(beta=0.5, max_steps=9)
    spoil_reference(trainer, torch.nan, rows=slice(None), calls=9)
    with pytest.raises(NonFiniteError, match=r"(?s)3 steps in a row.*learning_rate"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert (tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_resume_knows_that_a_pass_over_the_prompts_ends_with_a_short_step(make_trainer, tmp_path):
    """A pass of 3 micro-steps at an accumulation of 2 is two steps; counted as 4, a resumed run sampled twice."""
    options = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"generation_batch_size": None, "max_steps": 8}

    def sampled_at(trainer, **keywords):
        places, plain = [], trainer.rloo.roll_out
        trainer.rloo.roll_out = lambda *a, **k: (places.append(trainer.state.global_step), plain(*a, **k))[1]
        trainer.train_dataset = trainer.train_dataset.select(range(5))  # a window of 3 prompts, and 2 left over
        trainer.train(**keywords)
        return places

    whole = sampled_at(make_trainer(**options))
    assert whole == [0, 2, 4, 6]
    again = sampled_at(make_trainer(**options), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again == [2, 4, 6]


def test_training_again_in_the_process_it_was_cut_in_starts_clean(make_trainer):
    """A Ctrl-C between the micro-steps of a step left its rows behind, and the next `train` took them for its own."""
    trainer = make_trainer(gradient_accumulation_steps=4, max_steps=1)
    micro_step, sizes = trainer.training_step, []

    def cut(*arguments, **keywords):
        if trainer._step == 2:
            raise KeyboardInterrupt
        return micro_step(*arguments, **keywords)

    trainer.training_step = cut
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.training_step = micro_step
    plain = trainer._compute_loss
    trainer._compute_loss = lambda model, rows: (sizes.append(len(rows["rows"]) if rows else 0), plain(model, rows))[1]
    trainer.train()
    assert sizes == [0, 0, 0, 16]


def test_a_broken_evaluation_skips_no_step(make_trainer):
    """A NaN on a held-out prompt was charged to the training step after it, which was sound."""
    trainer = make_trainer(beta=0.1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    plain = trainer.rloo.scorer.score

    def broken(model, groups, need_entropy=True):
        found = plain(model, groups, need_entropy)
        return found if model.training else type(found)(found.logps * torch.nan, found.entropies)

    trainer.rloo.scorer.score = broken
    trainer.train()
    assert skipped(trainer) == [0.0, 0.0]
    assert any("eval_reward" in logs for logs in trainer.state.log_history)


def test_the_adapter_that_trl_makes_for_a_quantised_model_stays_in_float32(tiny_folder, tiny_tokenizer, tmp_path):
    """TRL casts it to bf16, where 0.01 + 1e-6 is 0.01: a run at the default learning rate that never moves."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    trainer = RLOOTrainer(
        model=str(tiny_folder),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        reward_funcs=by_length,
        args=RLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
        processing_class=tiny_tokenizer,
    )
    assert trainer.model.is_loaded_in_4bit
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}


def test_images_are_refused(make_trainer):
    """The loop scores text only; an image column would be dropped on the way and the run would train blind."""
    trainer = make_trainer()
    with pytest.raises(DataError, match="the dataset has images in column image: drop the column"):
        trainer.rloo.roll_out(trainer.model, [{"prompt": "x", "image": object()}])


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_no_forward_of_a_run_attends_through_cudnn(engine, make_trainer, make_tiny_model, monkeypatch):
    """With another kernel in a recompute of checkpointing, the gradient would belong to other states."""
    enabled, model = torch.backends.cuda.cudnn_sdp_enabled, make_tiny_model()
    seen = []  # for each call of a layer: is cuDNN allowed, is it for training
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append((enabled(), torch.is_grad_enabled())))
    monkeypatch.setattr(packing, "_prefers_cudnn", lambda: True)
    monkeypatch.setattr(packing, "install", refuse_packing)
    trainer = make_trainer(
        model=model, gradient_checkpointing=True, rollout_engine=engine, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.rloo.scorer.layout == "padded" and {grad for _, grad in seen} == {True, False}
    assert not any(allowed for allowed, _ in seen) and enabled()


def refuse_packing(_model):
    raise ValueError("a test")

"""One gradient, however it is computed: memory modes, sizes of passes, splits of the batch; real training steps."""

from itertools import cycle

import pytest
import torch
from datasets import Dataset

from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scorer
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.step import RLOOStep
from rloo_kit.loop.trainer import RLOOTrainer
from tests.loop.conftest import TWO_GROUPS, by_length, unless_72, with_adapter

PROMPTS = ["What is 1+1?", "A much longer prompt than the other"]
TOLERANCE = 2e-6  # of the gradient's norm, float32


def tied(completion_ids, **_):
    """The first group earns one reward, the second does not."""
    return [1.0 if index < 4 else float(index) for index in range(len(completion_ids))]


@pytest.fixture
def step(make_tiny_model, tiny_tokenizer, tmp_path):
    """`step(reward, **options)`: LoRA gradients of the first optimizer step, the trainer, and what was computed."""

    def run(reward=by_length, steps=1, completions=TWO_GROUPS, model=None, attention="sdpa", more=(), **options):
        if model is None:
            model = with_adapter(make_tiny_model(attn_implementation=attention))
        settings = {
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4, "beta": 0.3,
            "learning_rate": 1e-2,
        } | options  # fmt: skip
        trainer = RLOOTrainer(
            model=model,
            reward_funcs=reward,
            args=RLOOConfig(
                output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, seed=3,
                max_completion_length=6, max_steps=steps, logging_steps=1, save_strategy="no",
                reference="base", shuffle_dataset=False, max_grad_norm=0.0, **settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4 + list(more)}),
            processing_class=tiny_tokenizer,
        )  # fmt: skip
        coming = cycle(completions)
        trainer._generate_single_turn = lambda prompt_ids, *_: [list(next(coming)) for _ in prompt_ids]
        trainer.passes_seen = []
        plain = trainer.rloo.scorer.score

        def score(model, groups, need_entropy=True, **more):
            trainer.passes_seen.append((sum(len(group.completions) for group in groups), torch.is_grad_enabled()))
            return plain(model, groups, need_entropy, **more)

        trainer.rloo.scorer.score = score
        gradients = []
        close = trainer._close_step

        def keep():
            close()
            grads = [p.grad.clone() for p in trainer.model.parameters() if p.requires_grad]
            gradients.append(torch.cat([grad.flatten() for grad in grads]))

        trainer._close_step = keep
        trainer.train()
        return gradients if steps > 1 else gradients[0], trainer

    return run


def off(found, expected):
    assert expected.norm() > 1e-3, "the case has no gradient"
    return ((found - expected).norm() / expected.norm()).item()


# What of the step is compared: the reward and the options.
GRPO = {"baseline": "group_mean", "scale_rewards": "group"}
MASKED = {"mask_truncated_completions": True}
METHODS = {
    "some unscored": (unless_72, {}),
    "length-normalized KL": (unless_72, {"kl_form": "length_normalized"}),
    "a tied group": (tied, {}),
    "KL per token, no baseline": (by_length, {"kl_form": "per_token", "baseline": "none"}),
    "Dr. GRPO": (unless_72, GRPO | MASKED | {"token_mean": "none"}),
    "GRPO": (tied, GRPO | MASKED | {"token_mean": "completion", "kl_form": "length_normalized"}),
    "DAPO": (by_length, GRPO | MASKED | {"token_mean": "batch", "kl_form": "per_token"}),
}
# How it is computed: memory mode, batch x accumulation, tokens of a pass.
WAYS = [
    ("fast", 8, 40), ("fast", 8, 1), ("fast", 4, 10_000), ("fast", 2, 10_000), ("low", 8, 40), ("low", 1, 40),
    ("balanced", 1, 1), ("balanced", 2, 10_000),
]  # fmt: skip
# One method goes all ways; each other goes by a whole batch, by a split one and by single rows.
ALL_WAYS, SOME_WAYS = "some unscored", [("fast", 8, 1), ("fast", 2, 10_000), ("low", 1, 40)]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name == "a tied group" else pytest.mark.slow) for name in METHODS]
)
def test_every_way_of_computing_makes_one_gradient(method, step):
    """How a batch is split is a matter of memory; a deviation or count of one pass is another method."""
    reward, options = METHODS[method]
    expected, trainer = step(reward, memory="balanced", tokens_per_pass=40, **options)
    rows = trainer.state.log_history[0]
    assert any(not graph for _, graph in trainer.passes_seen), "balanced scores the policy before its training passes"
    for memory, batch, tokens in WAYS if method == ALL_WAYS else SOME_WAYS:
        split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch}
        found, other = step(reward, memory=memory, tokens_per_pass=tokens, **options | split)
        assert off(found, expected) < TOLERANCE, (memory, batch, tokens)
        logs = other.state.log_history[0]
        for name in ("loss", "loss/policy_avg", "kl", "objective/rlhf_reward", "val/ratio", "kl/spread_ratio"):
            assert logs.get(name) == pytest.approx(rows.get(name), abs=1e-5), (memory, batch, tokens, name)
        if memory == "low":
            assert max(rows for rows, graph in other.passes_seen if graph) == 1, "one sequence at a time"
            without_graph = [rows for rows, graph in other.passes_seen if not graph]
            assert sum(without_graph) == 8 and len(without_graph) < 8, "short ones are scored together first"


@pytest.mark.slow
def test_checkpoints_and_the_fall_back_to_padded_rows_make_the_same_gradient(step):
    """The layers run again with the plan and attention of the forward pass; embeddings keep their gradient."""
    expected, _ = step(memory="balanced", gradient_checkpointing=False)
    plain = {"gradient_checkpointing": False}
    again, twice = (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": form}}
        for form in (False, True)
    )
    for attention, layout in (("sdpa", "shared"), ("eager", "padded")):
        for memory, options in (("fast", again), ("fast", twice), ("balanced", twice), ("low", again), ("low", plain)):
            found, trainer = step(memory=memory, attention=attention, tokens_per_pass=40, **options)
            assert trainer.rloo.scorer.scorer.layout == layout
            assert off(found, expected) < TOLERANCE, (attention, memory, options)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["balanced", "low"])
def test_padded_rows_of_one_length_share_a_pass(memory, step, monkeypatch):
    """In the order of the rollout a pass was as long as its longest row: mostly padding."""
    expected, _ = step(memory=memory)
    seen: list[list[int]] = []
    plain = RLOOStep._settled_pass

    def note(self, model, batch, rows, *more):
        seen.append([len(batch.prompts[row]) + len(batch.completions[row]) for row in rows])
        return plain(self, model, batch, rows, *more)

    monkeypatch.setattr(RLOOStep, "_settled_pass", note)
    found, trainer = step(memory=memory, attention="eager", tokens_per_pass=170)
    assert off(found, expected) < TOLERANCE and trainer.rloo.scorer.layout == "padded"
    lengths = [length for rows in seen for length in rows]
    assert len(lengths) == 8 and lengths == sorted(lengths) and len(seen) == (8 if memory == "low" else len(seen))
    padding = sum(max(rows) - length for rows in seen for length in rows)
    assert padding <= 16, f"{padding} of {sum(lengths)} tokens in {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_all_passes_of_a_rollout_have_one_layout(memory, step, monkeypatch):
    """Were each pass to choose its layout, the policy would be compared with another kernel's rounding."""
    from rloo_kit.gradient import scorer as module

    layouts: list[str] = []
    make, lay_out = module.Scorer.__init__, module.lay_out

    def with_a_choice(self, *args, **named):
        make(self, *args, **named)
        self.layouts = ("shared", "repeated")
        layouts.clear()  # those of the self-check

    monkeypatch.setattr(module.Scorer, "__init__", with_a_choice)
    monkeypatch.setattr(module, "lay_out", lambda *some: layouts.append(some[1]) or lay_out(*some))
    found = {}
    for pays, layout in ((1.3, "shared"), (50.0, "repeated")):
        monkeypatch.setattr(module, "SHARED_PAYS", pays)
        found[layout], _ = step(memory=memory, num_iterations=2, steps=2)
        assert set(layouts) == {layout}
    for one, other in zip(found["shared"], found["repeated"], strict=True):
        assert off(one, other) < TOLERANCE


def test_fast_scores_the_policy_once(step):
    """A second policy pass on-policy is a quarter of the step for nothing."""
    for tokens, passes in ((1, [4, 4]), (30, [4, 4]), (10_000, [8])):
        _, trainer = step(memory="fast", tokens_per_pass=tokens)
        assert trainer.passes_seen == [(rows, True) for rows in passes], "whole groups, with their graph, once"


def test_a_step_without_any_signal_moves_momentum_and_says_how_sure_the_policy_is(step):
    """TRL has gradients of 0 there, and Adam goes on; the entropy, the likeliest reason, was not in the log."""
    found, tied_everywhere = step(lambda completion_ids, **_: [1.0] * len(completion_ids), beta=0.0)
    assert all(not graph for _, graph in tied_everywhere.passes_seen), "nothing is trained"
    assert found.numel() > 0 and found.abs().sum() == 0.0
    _, all_rows = step(lambda completion_ids, **_: [1.0] * len(completion_ids), beta=1e-12)
    logs, wanted = (trainer.state.log_history[0] for trainer in (tied_everywhere, all_rows))
    for name in ("entropy", "policy/entropy_avg", "objective/entropy"):
        assert logs[name] == pytest.approx(wanted[name], rel=1e-5) and logs[name] > 1.0, name
    assert logs["rollout/skipped_rows_ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (by_length, {"beta": 0.0}),
        (unless_72, {"memory": "fast"}),
        (unless_72, {"memory": "low", "tokens_per_pass": 30}),
    ],
)
def test_a_step_is_the_same_from_one_rollout_or_from_several(reward, options, step):
    """The configs for a GPU made a step of four rollouts; one call trains the same, with no larger graph."""
    options = {"steps": 2, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 1} | options
    several, trainer = step(reward, steps_per_generation=4, **options)
    one, whole = step(reward, **options)
    assert all(off(found, expected) < TOLERANCE for found, expected in zip(one, several, strict=True))
    assert trainer.rloo.settings.on_policy and whole.rloo.settings.on_policy
    logs = [[row for row in made.state.log_history if "reward" in row] for made in (trainer, whole)]
    for before, after in zip(*logs, strict=True):
        for name in ("loss/policy_avg", "frac_score_zero_std", "rewards/unscored_ratio", "episode"):
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
    if options.get("tokens_per_pass") or options.get("memory") == "low":
        rows = [max(rows for rows, graph in made.passes_seen if graph) for made in (trainer, whole)]
        assert rows[0] == rows[1] < 8


@pytest.mark.slow
def test_off_policy_steps_keep_what_the_rollout_was_scored_with(step):
    """Four updates from one rollout: by whole groups where they fit, with the ratio against the rollout's policy."""
    options = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "num_iterations": 2, "learning_rate": 0.05}
    expected, _ = step(steps=4, memory="balanced", **options)
    for memory in ("fast", "low"):
        found, trainer = step(steps=4, memory=memory, **options)
        assert all(off(one, other) < TOLERANCE for one, other in zip(found, expected, strict=True))
        ratios = [logs["val/ratio"] for logs in trainer.state.log_history if "val/ratio" in logs]
        assert ratios[0] == 1.0
        assert ratios[-1] != 1.0


@pytest.mark.slow
def test_tied_groups_are_not_computed_and_count(step):
    """Tied groups took half of the time; they count in the loss's mean all the same, as in TRL."""
    sums = {}
    for mean in ("none", "completion", "batch"):
        sums[mean], trainer = step(tied, beta=0.0, token_mean=mean)
        assert [rows for rows, _ in trainer.passes_seen] == [4]
        assert trainer.state.log_history[0]["rollout/skipped_rows_ratio"] == pytest.approx(0.5)
        # the penalty weighs nothing, yet no advantage is exactly 0
        plain, _ = step(tied, beta=1e-12, token_mean=mean, memory="balanced")
        assert off(sums[mean], plain) < 1e-5
    tokens = sum(map(len, TWO_GROUPS))
    assert off(sums["batch"] * tokens, sums["none"] * len(TWO_GROUPS)) < TOLERANCE, "one ratio a step, on-policy"


@pytest.mark.slow
@pytest.mark.parametrize("mean", ["completion", "batch"])
def test_a_mean_over_tokens_is_that_of_each_step_of_a_rollout(mean, step):
    """Two updates from one rollout, the second off-policy: each divides by its own rows' tokens."""
    options = GRPO | {"token_mean": mean, "steps_per_generation": 2, "per_device_train_batch_size": 4, "beta": 0.0}
    expected, trainer = step(steps=2, memory="balanced", learning_rate=0.0, **options)
    for memory in ("fast", "low"):
        found, _ = step(steps=2, memory=memory, learning_rate=0.0, **options)
        assert all(off(one, other) < TOLERANCE for one, other in zip(found, expected, strict=True))
    whole, _ = step(learning_rate=0.0, **options | {"steps_per_generation": None, "per_device_train_batch_size": 8})
    counts = [sum(map(len, TWO_GROUPS[rows])) for rows in (slice(0, 4), slice(4, 8))]
    shares = [count / sum(counts) for count in counts] if mean == "batch" else [0.5, 0.5]
    orders = [shares, shares[::-1]]  # which group a step takes first is drawn
    mixed = [sum(share * one for share, one in zip(order, expected, strict=True)) for order in orders]
    assert min(off(one, whole) for one in mixed) < TOLERANCE
    assert not trainer.rloo.settings.on_policy


def test_fast_says_when_it_falls_back(step, capsys):
    """The deviation of a rollout is not known before all of it is scored; who asks for `fast` has to know the cost."""
    expected, _ = step(memory="balanced", normalize_advantages=True)
    found, _ = step(memory="fast", normalize_advantages=True)
    assert off(found, expected) < TOLERANCE
    assert "memory: fast, which falls back to balanced: normalize_advantages" in capsys.readouterr().out


def test_dropout_is_off_while_scoring(make_tiny_model, step):
    """With dropout the KL of a policy from itself is not 0; TRL's switch misses the share in Qwen3's attention."""
    from peft import LoraConfig, get_peft_model

    groups = [Group(torch.arange(65, 70), [torch.tensor([72, 260, 70, 258]), torch.tensor([90, 258])])]

    def spread(model, scorer):
        model.train()
        with torch.no_grad():
            return (scorer.score(model, groups).logps - scorer.score(model, groups).logps).abs().max().item()

    for shares in ((0.5, 0.0), (0.0, 0.5)):
        config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=shares[0], init_lora_weights=False)
        model = get_peft_model(make_tiny_model(attention_dropout=shares[1]), config)
        assert spread(model, Scorer(model, 1.0, pad_id=256)) > 1e-3, "as TRL leaves it"
        _, trainer = step(model=model)
        assert spread(model, trainer.rloo.scorer.scorer) == 0.0

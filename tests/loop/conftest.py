"""Trainers and whole runs on a tiny random Qwen3, for tests of a few real steps."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file

CONFIG = """
run: {{output_dir: {output}, evaluate: false, progress_every_s: 0, sample_every_steps: 2}}
model: {{name: {model}, lora: {{r: 2, alpha: 2, target_modules: [q_proj, v_proj]}}, max_seq_length: 128}}
data: {{source: {data}, test_size: 2, max_prompt_length: 64}}
rewards: [{{name: length_reward}}]
rloo:
  max_steps: 4
  learning_rate: 1e-2
  lr_scheduler_type: constant
  per_device_train_batch_size: 8
  num_generations: 4
  max_completion_length: 6
  beta: 0.0
"""


EOS = 258
TWO_GROUPS = [
    [72, 260, 70, EOS], [72, 73, 74, 75, 76, 77], [260, EOS], [65, 66, 67, 260, 68, EOS],
    [90, EOS], [91, 92, 93], [94, 95, 96, 97, 98, EOS], [99, 260, EOS],
]  # fmt: skip


def conversations(number=6):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{n}+1="}] for n in range(number)]})


def stream(number):
    """A dataset without a length."""
    return IterableDataset.from_generator(lambda: ({"prompt": f"{n}+2="} for n in range(number)))


def by_ids(completion_ids, **_):
    """Different for nearly every completion, so that there is something to learn."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def by_length(completion_ids, **_):
    """Different for the completions of a table: by their length and their first id."""
    return [len(ids) / 3 - 0.7 * ids[0] / 90 for ids in completion_ids]


def unless_72(completion_ids, **_):
    """None for two of the first group's completions of `TWO_GROUPS`, which are then not scored at all."""
    return [None if ids[0] == 72 else float(len(ids)) for ids in completion_ids]


SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 256,
}  # fmt: skip


def mixture():
    """A random mixture of four experts, always the same."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=8, **experts))


def with_adapter(model):
    """A trained LoRA on a model, always the same: in a fresh one B is zero, and with it the KL and most gradients."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


def lines(folder, name):
    """The rows of a JSONL file."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder):
    """The weights that a run or a checkpoint has saved."""
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def assert_same(one, other):
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert tensor.equal(other[name]), name


def status(folder):
    return json.loads((folder / "status.json").read_text())


@pytest.fixture
def write_config(tmp_path, tiny_folder):
    """`write_config(name)`: a run's YAML file on the tiny model, with everything below the test's own folder."""

    def write(name="tiny"):
        rows = [{"prompt": f"add {n}", "answer": str(n)} for n in range(16)]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = tmp_path / f"{name}.yaml"
        file.write_text(CONFIG.format(output=tmp_path / "outputs", model=tiny_folder, data=tmp_path / "prompts.jsonl"))
        return file

    return write


@pytest.fixture
def start(write_config):
    """`start("rloo.max_steps=2", rewards=[...], resume=True)`: load everything afresh, train, return the result."""

    from rloo_kit import load_config, load_data, load_policy, train

    def run(*overrides, rewards=(by_ids,), policy=None, **options):
        config = load_config(write_config(), *overrides)
        policy = policy or load_policy(config)
        run.policy = policy
        return train(config, policy, load_data(config, policy.tokenizer), list(rewards), **options)

    return run


@pytest.fixture
def make_trainer(make_tiny_model, tiny_tokenizer, tmp_path):
    """`make_trainer(rewards, completions=..., arguments={...}, **options)`: our trainer; completions may be given."""

    def build(rewards, completions=None, model=None, lora=True, prompts=8, arguments=None, **options):
        from peft import LoraConfig

        from rloo_kit import RLOOConfig, RLOOTrainer

        settings = {
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "report_to": "none",
            "disable_tqdm": True, "num_generations": 4, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no",
        } | options  # fmt: skip
        data = Dataset.from_dict({"prompt": [f"<|im_start|>user {n}<think>\n" for n in range(prompts)]})
        given = {"reward_funcs": rewards, "train_dataset": data, "processing_class": tiny_tokenizer}
        given["eval_dataset"] = data.select(range(2)) if "eval_strategy" in options else None
        given["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
        given |= arguments or {}
        if "model" not in given:
            given["model"] = model or make_tiny_model()
        trainer = RLOOTrainer(**{"args": RLOOConfig(**settings)} | given)
        if completions is not None:
            trainer._generate_single_turn = lambda ids, *_: [
                list(completions[row % len(completions)]) for row in range(len(ids))
            ]
        return trainer

    return build


@dataclass
class Trained:
    """A trainer after `train()`.

    Attributes:
        steps: the log of each optimizer step. rows: what `rollout_listeners` were handed, a dict a completion.
        moved, kept: names of the policy's parameters that changed, and of those that did not.
    """

    trainer: Any
    steps: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    moved: set[str]
    kept: set[str]


@pytest.fixture
def trl_train(make_trainer, tiny_folder):
    """`trl_train(reward, arguments={...}, max_steps=1)`: the call of TRL's own examples, with all weights trained."""

    def run(reward=by_ids, completions=None, arguments=None, before=None, **options):
        settings = {
            "learning_rate": 0.1, "max_steps": 2, "per_device_train_batch_size": 4, "max_completion_length": 6,
        } | options  # fmt: skip
        given = {"model": str(tiny_folder), "eval_dataset": None}
        given |= {"train_dataset": Dataset.from_dict({"prompt": [f"{n}+1=" for n in range(6)]})} | (arguments or {})
        trainer = make_trainer(reward, completions, lora=False, arguments=given, **settings)
        rows = []
        trainer.rollout_listeners.append(rows.extend)
        if before is not None:
            before(trainer)
        old = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        moved = {name for name, parameter in trainer.model.named_parameters() if not old[name].equal(parameter)}
        steps = [logs for logs in trainer.state.log_history if "loss" in logs]
        return Trained(trainer, steps, rows, moved, old.keys() - moved)

    return run

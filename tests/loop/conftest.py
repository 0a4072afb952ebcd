"""Trainers on a tiny random Qwen3, for tests of a few real steps."""

import pytest
from datasets import Dataset


@pytest.fixture
def make_trainer(make_tiny_model, tiny_tokenizer, tmp_path):
    """`make_trainer(rewards, completions=..., **options)`: our trainer on some prompts, with given completions or its
    own."""

    def build(rewards, completions=None, model=None, lora=True, prompts=8, **options):
        from peft import LoraConfig

        from rloo_kit.loop.options import RLOOConfig
        from rloo_kit.loop.trainer import RLOOTrainer

        settings = {
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "report_to": "none",
            "disable_tqdm": True, "num_generations": 4, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no",
        } | options  # fmt: skip
        data = Dataset.from_dict({"prompt": [f"<|im_start|>user {n}<think>\n" for n in range(prompts)]})
        trainer = RLOOTrainer(
            model=model or make_tiny_model(),
            reward_funcs=rewards,
            args=RLOOConfig(**settings),
            train_dataset=data,
            eval_dataset=data.select(range(2)) if "eval_strategy" in options else None,
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
        )
        if completions is not None:
            trainer._generate_single_turn = lambda prompt_ids, *_: [list(ids) for ids in completions[: len(prompt_ids)]]
        return trainer

    return build

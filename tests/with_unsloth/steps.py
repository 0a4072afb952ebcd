"""Two RLOO steps on completions that are given, by the kit's trainer; as a program: on the transformers backend.

python steps.py MODEL_FOLDER ADAPTER_FOLDER OUT.pt

Nothing is sampled, so what two backends make of the same rollout can be compared to the last digit.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = ("ab", "abc cab")
# A line is a group of K = 4; two groups a step. Ragged; some close their thinking, some end at once or are cut off.
COMPLETIONS = (
    "de</think>f<|im_end|>", "hgfe", "<|im_end|>", "abcdefgh",
    "ga", "h</think><|im_end|>", "b b b b b", "cde<|im_end|>",
    "a", "fe</think>d<|im_end|>", "gh gh", "<|im_end|>",
    "ddd<|im_end|>", "abcabc", "h", "c</think>b a<|im_end|>",
)  # fmt: skip
GENERATIONS = 4


class Recorded:
    """An engine that gives the completions above, in their order."""

    name, reason, rows = "recorded", "the completions are given", None

    def __init__(self, tokenizer: Any):
        self._left = [tokenizer(text)["input_ids"] for text in COMPLETIONS]

    def sample(self, prompt_ids: Any, limits: Any, expected_lengths: Any = None, on_progress: Any = None) -> Any:
        from rloo_kit.rollout.types import Rollout

        taken, self._left = self._left[: len(prompt_ids)], self._left[len(prompt_ids) :]
        return Rollout(taken, [None] * len(taken), None)


def steps(policy: Any) -> dict[str, Any]:
    """Gradients before each of the two steps, the adapter after them, what the log says, and how rows were scored.

    With a penalty against the adapter that the run began with; plain gradient descent, because Adam makes a sign of
    every rounding error.
    """
    from datasets import Dataset
    from transformers import TrainerCallback

    from rewards import thinking_reward
    from rloo_kit import RLOOConfig, RLOOTrainer

    gradients: list[dict[str, Any]] = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            gradients.append({name: value.grad.clone() for name, value in trained(policy.model).items()})

    with tempfile.TemporaryDirectory() as folder:
        args = RLOOConfig(
            output_dir=folder, use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=8,
            num_generations=GENERATIONS, max_completion_length=16, beta=0.05, learning_rate=0.5,
            lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, shuffle_dataset=False, logging_steps=1,
            report_to="none", save_strategy="no", seed=3, **policy.config_arguments,
        )  # fmt: skip
        trainer = RLOOTrainer(
            model=policy.model,
            reward_funcs=thinking_reward.with_(think_end_id=policy.tags.end_id),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * 2}),
            processing_class=policy.tokenizer,
            callbacks=[Recorder()],
        )
        trainer._engine = Recorded(policy.tokenizer)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    names = ("kl", "entropy", "reward", "val/ratio", "completions/mean_length")
    return {
        "gradients": gradients,
        "adapter": {name: value.detach().clone() for name, value in trained(policy.model).items()},
        "logs": [{name: entry[name] for name in names} for entry in logs],
        "scoring": trainer._scorer.layout,
    }


def trained(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def main(model: str, adapter: str, out: str) -> None:
    import torch

    from rloo_kit import load_config, load_policy

    run = Path(out).with_suffix(".yaml")
    run.write_text(
        f'model: {{name: "{model}", adapter: "{adapter}", dtype: float32}}\n'
        "data: {source: embedded/addition, max_prompt_length: 32}\n"
        "rewards: [{name: thinking_reward}]\n"
        "rloo: {max_steps: 1, max_completion_length: 16}\n"
    )
    policy = load_policy(load_config(run))
    assert policy.backend == "transformers" and "unsloth" not in sys.modules
    torch.save(steps(policy), out)


if __name__ == "__main__":
    main(*sys.argv[1:])

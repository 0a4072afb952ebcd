"""What two processes have to agree on, computed for one policy; as a program: in a process without Unsloth.

python programs.py numbers|steps|imitate|images MODEL_FOLDER ADAPTER_FOLDER OUT.pt     by the transformers backend
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = ["ab", "abc cab"]
ANSWERS = ["de</think>f<|im_end|>", "hgfe"]
# A line is a group of K = 4; two groups a step. Ragged; some close their thinking, some end at once or are cut off.
COMPLETIONS = (
    "de</think>f<|im_end|>", "hgfe", "<|im_end|>", "abcdefgh",
    "ga", "h</think><|im_end|>", "b b b b b", "cde<|im_end|>",
    "a", "fe</think>d<|im_end|>", "gh gh", "<|im_end|>",
    "ddd<|im_end|>", "abcabc", "h", "c</think>b a<|im_end|>",
)  # fmt: skip
GENERATIONS = 4
IMITATE = """\
model: {name: the one that is given, max_seq_length: 128}
data: {source: embedded/addition}
rewards: [{name: thinking_reward}]
rloo: {max_steps: 1, optim: sgd, max_grad_norm: 0}
sft: {max_steps: 2, learning_rate: 0.5, per_device_train_batch_size: 2, gradient_accumulation_steps: 2}
"""


def numbers(policy: Any) -> dict[str, Any]:
    """Log-probabilities, entropies, their gradients, logits of left-padded rows, and greedy completions."""
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer
    from rloo_kit.rollout.completions import generate_completions

    model, tokenizer = policy.model, policy.tokenizer
    rows = tokenizer([prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)], padding=True)
    mask = torch.tensor(rows["attention_mask"])
    padded = {}
    for mode in (True, False):  # training first: what Unsloth does with the mask depends on the calls before
        model.train(mode)
        with torch.no_grad():
            base = model.get_base_model().model(input_ids=torch.tensor(rows["input_ids"]), attention_mask=mask)
            logits = model(input_ids=torch.tensor(rows["input_ids"]), attention_mask=mask).logits
        padded[f"states, training={mode}"] = base.last_hidden_state[mask.bool()].clone()
        padded[f"logits, training={mode}"] = logits[mask.bool()].clone()
    generated = generate_completions(policy, PROMPTS, limits=6, temperature=0.0)
    scorer = Scorer(model, 1.0, tokenizer.pad_token_id, layout="padded")
    ids = [[torch.tensor(tokenizer(text)["input_ids"]) for text in texts] for texts in (PROMPTS, ANSWERS)]
    model.train()
    scores = scorer.score(model, [Group(prompt, [completion]) for prompt, completion in zip(*ids, strict=True)])
    scores.logps.sum().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    return {
        "logps": scores.logps.detach(),
        "entropies": scores.entropies,
        "gradients": gradients,
        "greedy": [completion.ids for completion in generated],
        **padded,
    }


def images(policy: Any) -> dict[str, Any]:
    """Log-probabilities of padded rows whose prompts have images, and their gradients; without those for Gemma3, which
    Unsloth runs through FlexAttention: on a CPU it has no backward pass."""
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer

    policy.model.train()
    pairs = zip(*(policy.tokenizer(texts)["input_ids"] for texts in (illustrated(), ANSWERS * 2)), strict=True)
    groups = [Group(torch.tensor(prompt), [torch.tensor(answer)]) for prompt, answer in pairs]
    scorer = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id, layout="padded")
    with torch.set_grad_enabled(policy.backend != "unsloth" or policy.model.config.model_type != "gemma3"):
        logps = scorer.score(policy.model, groups).logps
    if not logps.requires_grad:
        return {"logps": logps, "gradients": {}}
    logps.sum().backward()
    return {"logps": logps.detach(), "gradients": {name: value.grad for name, value in trained(policy.model).items()}}


def illustrated() -> list[str]:
    """Four prompts with one image, one, none and two."""
    from rloo_kit.images.files import read_picture
    from rloo_kit.images.tokens import refer
    from tests.images.models import noise

    one, two = (refer(read_picture(noise(seed, *size), None)) for seed, size in ((1, (40, 32)), (2, (48, 80))))
    return [f"ab{one}c", f"{two} abc cab", "abcd ab", f"a{two}b{one}c"]


class Recorded:
    """An engine that gives the completions above, in their order."""

    name, reason, rows, token_steps = "recorded", "the completions are given", None, 0

    def __init__(self, tokenizer: Any):
        self._left = [tokenizer(text)["input_ids"] for text in COMPLETIONS]

    def sample(self, prompt_ids: Any, limits: Any, *_more: Any, **_named: Any) -> Any:
        from rloo_kit.rollout.types import Rollout

        taken, self._left = self._left[: len(prompt_ids)], self._left[len(prompt_ids) :]
        nothing: list[Any] = [[] for _ in taken]
        return Rollout(taken, nothing, None, nothing)


def make_trainer(policy: Any, args: Any, prompts: list[str], callbacks: Any = None) -> Any:
    """The kit's trainer with `thinking_reward`."""
    from datasets import Dataset

    from rewards import thinking_reward
    from rloo_kit import RLOOTrainer

    return RLOOTrainer(
        model=policy.model,
        reward_funcs=thinking_reward.with_(think_end_id=policy.tags.end_id),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=policy.tokenizer,
        callbacks=callbacks,
    )


def steps(policy: Any) -> dict[str, Any]:
    """Two RLOO steps on given completions: gradients, the adapter after them, the log, and how rows were scored. By
    plain gradient descent, because Adam makes a sign of every rounding error."""
    from transformers import TrainerCallback

    from rloo_kit import RLOOConfig

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
        trainer = make_trainer(policy, args, PROMPTS * 2, [Recorder()])
        trainer.rloo.sampler.engine = Recorded(policy.tokenizer)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    names = ("kl", "entropy", "reward", "val/ratio", "completions/mean_length")
    return {
        "gradients": gradients,
        "adapter": {name: value.detach().clone() for name, value in trained(policy.model).items()},
        "logs": [{name: entry[name] for name in names} for entry in logs],
        "scoring": trainer.rloo.scorer.scorer.layout,
    }


def imitate(policy: Any) -> dict[str, Any]:
    """Two steps of supervised training of two micro-steps each: losses, entropies, the adapter after them, and which
    SFTTrainer of TRL's it was. Plain gradient descent, as in `steps`."""
    from rloo_kit import load_config
    from rloo_kit.tasks.worked import Demonstrations, Example
    from rloo_kit.training.sft import build_trainer

    tokenizer = policy.tokenizer
    texts = [PROMPTS[row % 2] for row in range(8)], [text for text in COMPLETIONS if text != "<|im_end|>"][:8]
    rows = [[tokenizer(text)["input_ids"] for text in side] for side in texts]
    worked = Demonstrations([Example(*pair) for pair in zip(*rows, strict=True)], 8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imitate.yaml"
        file.write_text(IMITATE)
        run = load_config(file)
        trainer = build_trainer(run, policy, worked, Path(folder))
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "entropies": [entry["entropy"] for entry in logs],
        "adapter": {name: value.detach().clone() for name, value in trained(policy.model).items()},
        "classes": [cls.__module__ + "." + cls.__qualname__ for cls in type(trainer).__mro__],
    }


def trained(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def load(model: str, adapter: str, out: str) -> Any:
    """The policy of that model and adapter, by the transformers backend."""
    from rloo_kit import load_config, load_policy

    run = Path(out).with_suffix(".yaml")
    vision = ", vision: true" if "vision_config" in (Path(model) / "config.json").read_text() else ""
    run.write_text(
        f'model: {{name: "{model}", adapter: "{adapter}", dtype: float32{vision}}}\n'
        "data: {source: embedded/addition, max_prompt_length: 32}\n"
        "rewards: [{name: thinking_reward}]\n"
        "rloo: {max_steps: 1, max_completion_length: 16}\n"
    )
    policy = load_policy(load_config(run))
    assert policy.backend == "transformers"
    return policy


def main(name: str, model: str, adapter: str, out: str) -> None:
    import torch

    found = {"numbers": numbers, "steps": steps, "imitate": imitate, "images": images}[name](load(model, adapter, out))
    assert "unsloth" not in sys.modules
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

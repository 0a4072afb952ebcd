"""One process of a run for `test_parallel`: a few optimizer steps a case; what came of them goes to files.

    python parallel_step.py '{"folder": ..., "out": ..., "processes": 1, "cases": {...}}'        (or under a launcher)

Model, adapter, prompts, completions and rewards are the same whatever the number of processes: 8 completions a step.
`sharding` is "fsdp2" or nothing. accelerate shards on accelerators only, so its choice of a backend is the one thing
that is replaced: gloo and the CPU. What it does then (`fully_shard`, clipping, state dicts) is its own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

FSDP_VARIABLES = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # fmt: skip
# (tokens of the completion, whether the model ended it), row by row; the last rows of the first group are long
LENGTHS = ((3, True), (9, True), (6, False), (2, True), (5, True), (7, True), (1, True), (4, False))
EOS = 258


def shard_on_the_cpu() -> None:
    os.environ.update({"ACCELERATE_TORCH_DEVICE": "cpu"} | FSDP_VARIABLES)
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def completion(prompt_ids: list[int], row: int) -> list[int]:
    """Of a row of the whole batch, always the same."""
    tokens, ended = LENGTHS[row % len(LENGTHS)]
    ids = [20 + (7 * row + 3 * place + prompt_ids[-2]) % 200 for place in range(tokens)]
    return [*ids[:-1], EOS] if ended else ids


def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Not scored: a completion of one token. Tied where the sums of the ids are."""
    return [None if len(ids) == 1 else len(ids) / 10 + ids[0] / 100 for ids in completion_ids]


def first_group_only(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A signal in the batch's first group only: with one group a process, the other one is left without."""
    lengths = [tokens for tokens, _ in LENGTHS[:4]]
    is_first = [len(ids) for ids in completion_ids[:4]] == lengths
    return [len(ids) / 10 if is_first and row < 4 else 1.0 for row, ids in enumerate(completion_ids)]


def some_prompts_only(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Half of the prompts are solved by everyone: their groups are drawn again."""
    solved = [prompt.endswith(("0", "1", "2", "3")) for prompt in prompts]
    return [1.0 if done else ids[0] / 100 for done, ids in zip(solved, completion_ids, strict=True)]


REWARDS = {"scored": reward, "first": first_group_only, "some": some_prompts_only}


def build(settings: dict[str, Any], case: dict[str, Any]) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rloo_kit import RLOOConfig, RLOOTrainer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)
    if case.get("lora", True):
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
        for name, parameter in model.named_parameters():  # an adapter that has learnt something: a KL above 0
            if "lora_B" in name:
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    options = {
        "output_dir": settings["out"] + ".run", "use_cpu": True, "bf16": False, "report_to": "none", "seed": 1,
        "disable_tqdm": True, "max_completion_length": 9, "num_generations": 4, "max_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": 1, "tokens_per_pass": 24,
        "per_device_train_batch_size": 8 // settings["processes"], "reference": "base",
    }  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"<|im_start|>user {n}<think>\n{n}" for n in range(8)]})
    return RLOOTrainer(
        model=model,
        reward_funcs=REWARDS[case.get("reward", "scored")],
        args=RLOOConfig(**options | case.get("options", {})),
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(settings["folder"]),
    )


def train(settings: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    from transformers import TrainerCallback

    trainer = build(settings, case)
    accelerator, gradients, rows = trainer.accelerator, [], []
    if not case.get("sample"):

        def canned(prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
            first = accelerator.process_index * len(prompt_ids)
            return [completion(ids, first + number) for number, ids in enumerate(prompt_ids)]

        trainer._generate_single_turn = canned

    def whole(tensor: Any) -> Any:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            named = trainer.model.named_parameters()
            gradients.append({name: whole(value.grad) for name, value in named if value.requires_grad})

    trainer.add_callback(Keep())
    trainer.rollout_listeners.append(rows.extend)
    trainer.train()
    weights = {name: whole(value) for name, value in trainer.model.named_parameters() if value.requires_grad}
    sharded = any(hasattr(value, "to_local") for value in trainer.model.parameters())
    return {
        "gradients": gradients, "weights": weights, "logs": trainer.state.log_history, "rows": rows,
        "describe": trainer.describe(), "rank": accelerator.process_index, "world": accelerator.num_processes,
        "kind": trainer.rloo.parallel.kind, "sharded": sharded,
    }  # fmt: skip


def main(settings: dict[str, Any]) -> None:
    if settings.get("sharding"):
        shard_on_the_cpu()
    import torch

    for name, case in settings["cases"].items():
        found = train(settings, case)
        torch.save(found, f"{settings['out']}.{name}.{found['rank']}")
    from rloo_kit.collective import end_processes

    end_processes()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(json.loads(sys.argv[1]))

"""One process of a run for `test_server`: two steps with completions from a server; the log goes to a file.

    python server_step.py '{"folder": ..., "out": ..., "sharding": false, "options": {...}}'  (under RANK, WORLD_SIZE)

`sharding: true` shards with FSDP 2, on the CPU as `parallel_step` does it.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    from tests.loop.parallel_step import shard_on_the_cpu

    if settings.get("sharding"):
        shard_on_the_cpu("fsdp2")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rloo_kit import RLOOConfig, RLOOTrainer

    torch.set_num_threads(1)
    options = {
        "output_dir": settings["out"] + ".run", "use_cpu": True, "bf16": False, "report_to": "none", "seed": 1,
        "disable_tqdm": True, "max_completion_length": 9, "num_generations": 4, "max_steps": 2, "learning_rate": 0.1,
        "logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 4, "beta": 0.0,
        "rollout_engine": "server", "sampler_correction": "token",
    }  # fmt: skip
    trainer = RLOOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32),
        reward_funcs=lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        args=RLOOConfig(**options | settings["options"]),
        train_dataset=Dataset.from_dict({"prompt": [f"<|im_start|>user {n}<think>\n{n}" for n in range(8)]}),
        processing_class=AutoTokenizer.from_pretrained(settings["folder"]),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]),
    )
    trainer.train()
    found = {
        "logs": trainer.state.log_history,
        "describe": trainer.describe(),
        "sharded": any(hasattr(value, "to_local") for value in trainer.model.parameters()),
    }
    Path(f"{settings['out']}.{trainer.accelerator.process_index}").write_text(json.dumps(found))
    from rloo_kit.collective import end_processes

    end_processes()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(json.loads(sys.argv[1]))

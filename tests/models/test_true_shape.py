"""The real Qwen3 tokenizer and a model of Qwen3-0.6B's true shape, random weights, NF4: two steps of an evening.

Minutes on a CPU, and 1.2 GB of disk: `make tokenizers`, `RLOO_KIT_LONG=1 pytest tests/models/test_true_shape.py -rP`.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo_kit.runs.rollouts import read_rollouts

SMALLER = """
model.backend=transformers model.gradient_checkpointing=false model.load_in_4bit=true model.family=hybrid
model.enable_thinking=true data.subset=null data.prompt_column=prompt data.answer_after=null data.test_size=8
rloo.max_steps=2 rloo.gradient_accumulation_steps=8 rloo.optim=adamw_torch
rloo.max_completion_length=64 rloo.thinking_budget=24 rloo.answer_budget=8 run.evaluate=false
"""

pytestmark = [pytest.mark.slow, pytest.mark.long]


def make_checkpoint(folder: Path, tokenizer: Path) -> None:
    """Random weights of Qwen3-0.6B's shape in bf16, with the real tokenizer."""
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    config = Qwen3Config(**shape, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True)
    config.eos_token_id, config.bos_token_id = 151645, 151643
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize("name", ["evening_8gb", "evening_12gb", "evening_16gb", "evening_24gb", "evening_1_7b"])
def test_the_shipped_config_trains_at_true_shape(
    name: str, tmp_path: Path, repository: Path, qwen3_folder: Path
) -> None:
    """Until a real vocabulary of 151,936 rows and the real ids had run, the plan for the 0.6B was a computation."""
    make_checkpoint(tmp_path, qwen3_folder)
    words = [f"model.name={tmp_path}", f"run.output_dir={tmp_path}", "run.name=run", *SMALLER.split()]
    words += [f"data.source={repository / 'configs' / 'smollm2' / 'words.csv'}"]
    started = time.monotonic()
    command = [sys.executable, "-m", "rloo_kit.cli", "train", str(repository / "configs" / f"{name}.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(read_rollouts(tmp_path / "run"))
    assert len(rows) == 16 and all(row["forced"] and row["completion_ids"].count(151668) == 1 for row in rows)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    print(f"{time.monotonic() - started:.0f} s; memory: {json.dumps(memory)}")

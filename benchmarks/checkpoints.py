"""Checkpoints with random weights in the shapes of Qwen3, made on the machine: nothing is downloaded.

    python benchmarks/checkpoints.py 4b        makes it, and says where it is

A step on one costs what it costs on trained weights, and its memory is the same; what it writes is noise, and it does
not stop by itself. Tokenizer: single bytes with Qwen3's ids (`embedded/tokenizer.py`). "tiny" is for rehearsals on the
CPU: two layers, of sizes that Unsloth's kernels take. One thing is unlike the shipped 4-bit copies: of those some
layers are in 16 bit, of these none.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import reporting

TINY = "tiny"
TINY_CONFIG = {"initializer_range": 0.1, "positions": 2048}  # of the others 0.02 and 40960, as in Qwen3


def shape_of(size: str) -> Any:
    """The `ModelShape` of "0.6b" .. "32b" (Qwen3) or "tiny"."""
    from rloo_kit.plan.shapes import EMBEDDED, PUBLISHED

    if size == TINY:
        return replace(EMBEDDED, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1)
    return PUBLISHED[size]


def find_checkpoint(size: str) -> Path:
    """The folder of the checkpoint of a size; made, by a process of its own, where it is not there yet."""
    target = _folder(size)
    if not (target / "tokenizer_config.json").is_file():
        environment = os.environ | {"RLOO_KIT_BACKEND": "transformers"}  # no Unsloth, and none of its patches
        environment = {name: value for name, value in environment.items() if not name.startswith("UNSLOTH")}
        command = [sys.executable, str(Path(__file__).resolve()), size]
        subprocess.run(command, env=environment, cwd=reporting.ROOT, check=True)
    return target


def _folder(size: str) -> Path:
    return cells.scratch_folder() / f"qwen3-{size}-random"


def make_checkpoint(size: str) -> Path:
    """Write it in bfloat16 (tiny: float32) into the scratch folder; on the GPU where there is one with room for it."""
    from rloo_kit._stack import load_stack

    load_stack()
    import torch
    from transformers import Qwen3ForCausalLM

    from rloo_kit.embedded.tokenizer import build_tokenizer
    from rloo_kit.measure.stand_ins import make_config

    target, is_tiny = _folder(size), size == TINY
    tokenizer = build_tokenizer("thinking", "compact" if is_tiny else "qwen3")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = make_config(shape_of(size), **ids, **(TINY_CONFIG | {"dtype": "float32"} if is_tiny else {}))
    bytes_needed = 3 * shape_of(size).num_weights  # two a weight, and room
    roomy = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > bytes_needed
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if is_tiny else torch.bfloat16)
    try:
        with torch.device("cuda" if roomy else "cpu"):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if not target.exists():
        unfinished.rename(target)
    shutil.rmtree(unfinished, ignore_errors=True)  # another process was faster
    return target


if __name__ == "__main__":
    reporting.settle()
    started = time.monotonic()
    folder = make_checkpoint(sys.argv[1])
    size_gib = sum(file.stat().st_size for file in folder.iterdir()) / 2**30
    cells.report(folder=str(folder), gib=round(size_gib, 3), seconds=round(time.monotonic() - started, 1))

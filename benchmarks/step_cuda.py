"""`rloo_step.py` on a CUDA card: random-weight Qwen3-0.6B and 4B in 4-bit, with and without Unsloth.

The checkpoints are made from a config, so nothing is downloaded; a step costs what it costs with trained weights. Per
model there are two processes, because Unsloth patches TRL and transformers while it is imported: without it stock TRL
(whose Triton head runs here) and the kit, with it Unsloth's RLOO trainer, its GRPO trainer and the kit. Inside a
process the sides take turns as on the CPU. Peak memory is what `torch.cuda.max_memory_allocated` says above the level
before a step, each side in a process of its own. Seconds are of the wall clock, with the card synchronised. There are
no bars here. Left out: vLLM, and several cards.

Not measured yet: the machine that this was written on has no card.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import reporting
import step_workload
from step_workload import Workload

COMMON = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
MODELS = {  # as in the checkpoints' own config.json
    "Qwen3-0.6B": COMMON
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": COMMON
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
WORKLOAD = Workload(num_generations=4, vocabulary=151936, checkpointing=True)
SIDES = {"transformers": ("stock", "fast", "balanced", "low"), "unsloth": ("stock", "grpo", "fast", "balanced", "low")}
RESULT = reporting.RESULTS / "rloo_step_cuda.json"


def make_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint with random weights in bf16 and the byte tokenizer with Qwen3's ids, once."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = folder / name
    if (target / "tokenizer_config.json").is_file():
        return target
    tokenizer = step_workload.build_tokenizer(WORKLOAD)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(Qwen3Config(**MODELS[name], tie_word_embeddings=True, **ids))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def load(backend: str, checkpoint: Path) -> tuple[Any, Any, Any]:
    """Model in 4-bit, tokenizer, and the adapter's config (None where the model has its adapter already)."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    if backend == "transformers":
        four_bit = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, quantization_config=four_bit, dtype=torch.bfloat16, device_map={"": 0}
        )
        return model, AutoTokenizer.from_pretrained(checkpoint), LoraConfig(**step_workload.LORA)
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(checkpoint), max_seq_length=1024, dtype=torch.bfloat16, load_in_4bit=True
    )
    lora = {name: value for name, value in step_workload.LORA.items() if name != "task_type"}
    model = FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing="unsloth", random_state=0)
    return model, tokenizer, None


def build(name: str, backend: str, checkpoint: Path) -> Any:
    """A side on the card. Under Unsloth the model carries its own checkpointing, so the trainer's is off."""
    from step_sides import wrap_model

    model, tokenizer, peft_config = load(backend, checkpoint)
    workload = replace(WORKLOAD, checkpointing=WORKLOAD.checkpointing and backend == "transformers")
    return wrap_model(name, workload, model, tokenizer, peft_config, use_cpu=False, bf16=True)


def run_child(arguments: dict[str, Any]) -> int:
    """One process: the steps of some sides in turn, or the peak of one side; prints JSON on its last line."""
    import rloo_kit

    rloo_kit.setup_environment(arguments["backend"])  # imports Unsloth first where it is the backend
    from rloo_kit._stack import load_stack

    load_stack()
    checkpoint, backend = Path(arguments["checkpoint"]), arguments["backend"]
    if arguments.get("peak"):
        found: Any = _peak(arguments["peak"], backend, checkpoint)
    else:
        from rloo_step import take_turns

        sides = [build(name, backend, checkpoint) for name in arguments["sides"]]
        found = {}
        for part, canned in (("training", True), ("whole", False)):
            times = take_turns(sides, arguments["repeats"], canned)
            found[part] = {name: [asdict(step) for step in steps] for name, steps in times.items()}
    print("figures: " + json.dumps(found), flush=True)
    return 0


def _peak(name: str, backend: str, checkpoint: Path) -> float:
    """MiB on the card above the level before the step."""
    import torch

    side = build(name, backend, checkpoint)
    full = side.canned_completions
    side.canned_completions = [ids[:7] + ids[-1:] for ids in full]
    side.step()
    side.canned_completions = full
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    side.step()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def start_child(**arguments: Any) -> Any:
    """Run `run_child` in a fresh process and read what it found."""
    script = str(Path(__file__).with_name("rloo_step.py"))
    environment = os.environ | {"RLOO_KIT_BACKEND": arguments["backend"]}
    command = [sys.executable, script, "--cuda-child", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, cwd=reporting.ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("figures: ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{arguments} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("figures: "))


def main(options: argparse.Namespace) -> int:
    """Every model and backend; a side that fails is named in the results, and the others go on."""
    import torch

    started = time.monotonic()
    backends = ["transformers", *(["unsloth"] if importlib.util.find_spec("unsloth") else [])]
    models = list(MODELS) if options.full else list(MODELS)[:1]
    target = RESULT if options.results.name == "rloo_step.json" else options.results
    result = reporting.header("benchmarks/rloo_step.py") | {"card": torch.cuda.get_device_name(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            checkpoint = str(make_checkpoint(name, Path(folder)))
            gc.collect()
            torch.cuda.empty_cache()
            for backend in backends:
                row: dict[str, Any] = {"model": name, "backend": backend, "workload": asdict(WORKLOAD)}
                shared = {"backend": backend, "checkpoint": checkpoint}
                try:
                    row |= start_child(**shared, sides=SIDES[backend], repeats=options.repeats)
                    row["peak_mib"] = {side: start_child(**shared, peak=side) for side in SIDES[backend]}
                except RuntimeError as error:
                    row["failed"] = str(error)
                result["rows"].append(row)
                print(json.dumps(row)[:2000], flush=True)
    reporting.write(result | {"seconds": round(time.monotonic() - started)}, target)
    return 1 if any("failed" in row for row in result["rows"]) else 0

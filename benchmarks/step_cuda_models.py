"""What the cells of `step_cuda.py` run on: the checkpoint, the sides around it, and the memory of the GPU.

On a GPU: Qwen3-4B with random weights (`checkpoints.py`), in 4-bit, with LoRA, in bf16 (fp16 on GPUs without it).
Rehearsed: the tiny one on the CPU, in 4-bit through bitsandbytes where the backend is transformers; under Unsloth,
Triton's interpreter runs the kernels and the weights stay float32. The sides of stock are loaded as their own users do,
those of the kit by `load_policy`.
"""

import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cells
import checkpoints
import reporting
import step_workload
from step_workload import Workload

LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192}  # tokens of the longest completion
TINY_LONGEST, TINY_SHORTEST, TINY_PROMPTS = 6, 3, (5, 8)
RUN = """\
model: {{name: {name}, backend: {backend}, load_in_4bit: {four_bit}, dtype: {dtype}, max_seq_length: {length},
  gradient_checkpointing: unsloth}}
data: {{source: embedded/addition, max_prompt_length: {prompt}}}
rewards: [{{name: thinking_reward}}]
rloo: {{max_steps: 1}}
"""


@dataclass(frozen=True)
class Kind:
    """A side: `name` as in `step_sides.wrap_model`, the backend that loads its model, the rollout engine, its cache."""

    name: str
    backend: str
    engine: str = "generate"
    cache: str = "plain"


def size() -> str:
    """The checkpoint that the cells run on, for `checkpoints.find_checkpoint`."""
    return checkpoints.TINY if cells.rehearsing() else "4b"


def make_workload(length: str, rows: int | None = None, beta: float = 0.05) -> Workload:
    """The step of a cell; tiny when rehearsing.

    Args:
        length: a key of LENGTHS. rows: completions of a micro-batch; None for one group.
    """
    full = Workload(8, 151936, checkpointing=True, beta=beta, longest=LENGTHS[length], rows=rows)
    if not cells.rehearsing():
        return full
    step_workload.PROMPT_TOKENS, step_workload.SHORTEST = TINY_PROMPTS, TINY_SHORTEST
    tiny = {"num_generations": 2, "vocabulary": checkpoints.shape_of(checkpoints.TINY).vocab_size, "completions": 4}
    return replace(full, **tiny, longest=TINY_LONGEST, rows=rows and min(rows, 2))


# ------------------------------------------------------------------------------------------------------- the sides


def start_backend(backend: str, side: str = "") -> None:
    """Import the libraries in their order, Unsloth first where it is the backend; to be called before torch.

    Args:
        side: `Kind.name`; GRPO's shared prompts have no backward pass on the CPU, so rehearsed it goes without.

    Ends the process as a skipped cell where Unsloth is wanted and cannot be used.
    """
    os.environ["RLOO_KIT_BACKEND"] = backend
    if backend == "unsloth":
        if importlib.util.find_spec("unsloth") is None:
            cells.skip("Unsloth is not installed: pip install -e '.[gpu]'")
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cells.scratch_folder() / "unsloth_compiled_cache"))
        if cells.rehearsing():
            if side == "grpo":
                os.environ["UNSLOTH_GRPO_PREFIX_GROUPER"] = "0"
            _start_interpreter()
    import rloo_kit
    from rloo_kit._stack import load_stack

    settled = rloo_kit.setup_environment(backend)
    if settled.backend != backend:
        cells.skip(f"the backend is {settled.backend}: {settled.backend_reason}")
    load_stack()


def _start_interpreter() -> Any:
    """Unsloth on the CPU by the harness of its tests, and its GRPO trainer, which the harness leaves out."""
    module = _interpreter()
    module.import_unsloth(Path(tempfile.mkdtemp(prefix="unsloth-")))
    from unsloth.models import rl

    os.environ["UNSLOTH_ALLOW_CPU"] = "0"  # under "1" Unsloth leaves TRL's trainers alone
    try:
        rl._patch_trl_rl_trainers("grpo_trainer")
    finally:
        os.environ["UNSLOTH_ALLOW_CPU"] = "1"


def _interpreter() -> Any:
    return reporting.load_file("tests/with_unsloth/interpreter.py")


def build_side(kind: Kind, workload: Workload, **options: Any) -> Any:
    """A side of `step_sides` around the checkpoint; `options` are more arguments of its config."""
    from step_sides import wrap_model

    checkpoint = checkpoints.find_checkpoint(size())
    is_kit = kind.name not in ("stock", "grpo")
    if is_kit:
        policy = load_policy(load_run(kind, checkpoint, workload))
        model, tokenizer, peft_config = policy.model, policy.tokenizer, None
        options = policy.config_arguments | {"rollout_engine": kind.engine} | options
    else:
        model, tokenizer, peft_config = _load_stock(kind.backend, checkpoint, workload)
        options = {"gradient_checkpointing": kind.backend == "transformers"} | options
        if kind.backend == "unsloth" and cells.rehearsing():  # in float32 its trainer would switch mixed precision on
            os.environ["UNSLOTH_MIXED_PRECISION"] = "bfloat16"
    return wrap_model(kind.name, workload, model, tokenizer, peft_config, **_precision() | options)


def load_policy(run: Any) -> Any:
    """`rloo_kit.load_policy`; the run names its backend."""
    import rloo_kit

    _stay_on_cpu(run.model.backend)
    policy = rloo_kit.load_policy(run)
    _stay_on_cpu(run.model.backend)
    return policy


def load_run(kind: Kind, checkpoint: Path, workload: Workload) -> Any:
    """A `RunConfig` with that model, in its precision; data and rewards are only there to make it whole."""
    import rloo_kit

    interpreted = cells.rehearsing() and kind.backend == "unsloth"
    text = RUN.format(
        name=json.dumps(str(checkpoint)), backend=kind.backend, four_bit="false" if interpreted else "true",
        dtype="float32" if cells.rehearsing() else "auto", length=max_tokens(workload),
        prompt=step_workload.PROMPT_TOKENS[1],
    )  # fmt: skip
    file = Path(tempfile.mkdtemp(prefix="rloo-step-")) / "step.yaml"
    file.write_text(text, encoding="utf-8")
    completion = max_tokens(workload) - step_workload.PROMPT_TOKENS[1]
    return rloo_kit.load_config(file, f"rloo.max_completion_length={completion}")


def max_tokens(workload: Workload) -> int:
    """Tokens of the longest prompt and completion together, rounded up to 64."""
    return -(-(workload.longest + step_workload.PROMPT_TOKENS[1]) // 64) * 64


def _load_stock(backend: str, checkpoint: Path, workload: Workload) -> tuple[Any, Any, Any]:
    """Model, tokenizer, and the adapter's config (None where the model has its adapter already), as in their docs."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from rloo_kit.system import environment

    dtype = getattr(torch, environment.current().dtype_name)
    if backend == "transformers":
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        four_bit = BitsAndBytesConfig(load_in_4bit=True, **nf4)
        device = "cpu" if cells.rehearsing() else 0
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, quantization_config=four_bit, dtype=dtype, device_map={"": device}
        )
        return model, AutoTokenizer.from_pretrained(checkpoint), LoraConfig(**step_workload.LORA)
    from unsloth import FastLanguageModel

    _stay_on_cpu(backend)
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(checkpoint),
        max_seq_length=max_tokens(workload),
        dtype=torch.float32 if cells.rehearsing() else dtype,
        load_in_4bit=not cells.rehearsing(),
    )
    lora = {name: value for name, value in step_workload.LORA.items() if name != "task_type"}
    model = FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing="unsloth", random_state=0)
    _stay_on_cpu(backend)
    return model, tokenizer, None


def _precision() -> dict[str, Any]:
    """The config's arguments for this machine, and an optimizer that Unsloth does not exchange."""
    from rloo_kit.system import environment

    name = environment.current().precision
    return {"use_cpu": cells.rehearsing(), "bf16": name == "bf16", "fp16": name == "fp16", "optim": "adamw_torch"}


def _stay_on_cpu(backend: str) -> None:
    """Before a load and behind it: a load brings modules in that look for a GPU, and undoes what was put there."""
    if backend == "unsloth" and cells.rehearsing():
        _interpreter().keep_on_cpu()


# -------------------------------------------------------------------------------------------------------- its memory


def find_memory() -> Any:
    """The GPU's memory and its peaks (`tests/on_gpu/edge.py`); rehearsed, the machine's stands in."""
    import torch

    edge = reporting.load_file("tests/on_gpu/edge.py")
    return edge.Memory(edge.HostMemory(), "cpu") if cells.rehearsing() else edge.Memory(torch.cuda, "cuda")

"""Shared by the checks of one process: the backend, random checkpoints, runs, loaded policies, figures.

A check is a function of a `Bench` with a budget of seconds. Nothing imports torch before a worker runs.

Weights are random, in their true shapes: a step costs the same as on trained ones, and nothing is downloaded. In the
0.6B model, the row of the end token is set so that completions end after 12 to 24 tokens or so and rewards differ. In a
rehearsal, a tiny model stands in on the CPU: through transformers in 4-bit with bitsandbytes, through Unsloth's own
code in float32 with Triton's interpreter.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import reporting

from on_gpu import checks, memory
from on_gpu.checks import Check

RUN = """\
run: {{output_dir: {outputs}, sample_every_steps: 0, progress_every_s: 0}}
model: {{name: {name}, backend: {backend}, family: thinking, dtype: {dtype}, load_in_4bit: {four_bit},
  max_seq_length: {length}, gradient_checkpointing: unsloth}}
data: {{source: embedded/addition, num_prompts: 64, test_size: 16, max_prompt_length: 128}}
rewards: [{{name: thinking_reward}}]
rloo: {{max_steps: 5, per_device_train_batch_size: 8, gradient_accumulation_steps: 4, steps_per_generation: 4,
  num_generations: 8, max_completion_length: 64, learning_rate: {rate}, lr_scheduler_type: constant, warmup_steps: 0,
  beta: 0.0, report_to: [], save_steps: 1000}}
"""
SMALLER = (
    "rloo.per_device_train_batch_size=4", "rloo.gradient_accumulation_steps=1", "rloo.steps_per_generation=1",
    "rloo.num_generations=2", "rloo.max_completion_length=8", "data.max_prompt_length=32",
)  # fmt: skip
LEARNING_RATE, TINY_LEARNING_RATE = 3e-4, 1e-2
MAX_TOKENS = 8448  # completions of 8k and their prompts; Unsloth's training forward truncates stock's longer rows
USUAL_LENGTH, TINY_USUAL_LENGTH = 12, 6  # tokens after which a random 0.6B ends on average


class Skipped(Exception):
    """A check that does not apply on this machine; the text says why."""


class Bench:
    """The argument of a check.

    Args:
        backend: "unsloth" or "transformers", whose libraries are loaded. scratch: folder for checkpoints and for
            files that one process leaves for another. lines: file of the results. rehearsed: tiny, on the CPU.
    """

    def __init__(self, backend: str, scratch: Path, lines: Path, rehearsed: bool) -> None:
        self.backend, self.scratch, self.lines, self.rehearsed = backend, scratch, lines, rehearsed
        self.check: Check | None = None
        self.ends = math.inf  # deadline of the running check, on time.monotonic
        self._shared: dict[Any, Any] = {}

    @property
    def interpreted(self) -> bool:
        """Whether Unsloth's kernels are interpreted: float32, and no 4-bit weights."""
        return self.rehearsed and self.backend == "unsloth"

    @property
    def cuda(self) -> Any:
        """`torch.cuda`, whose `is_available` is False in a rehearsal."""
        import torch

        return torch.cuda

    @property
    def left_s(self) -> float:
        """Seconds that the check may still take."""
        return self.ends - time.monotonic()

    def report(self, **values: Any) -> None:
        """Write figures to the results at once."""
        name = self.check.name if self.check else ""
        checks.append(self.lines, "figure", check=name, values=values)
        print(f"{name}: {json.dumps(values)}", flush=True)

    # ------------------------------------------------------------------------------------------------- models and runs

    def checkpoint(self, size: str) -> Path:
        """The folder of the random "0.6b" or "4b", the tiny one in a rehearsal; another process may still make it."""
        folder = self.checkpoint_folder(size)
        while not folder.is_dir():
            time.sleep(0.2)
        return folder

    def checkpoint_folder(self, size: str) -> Path:
        return self.scratch / f"qwen3-{'tiny' if self.rehearsed else size}-random"

    def make_run(self, size: str, *overrides: str, four_bit: bool = True, name: str = "") -> Any:
        """A short run on the checkpoint of that size (or `name`), in the folder `name` of the scratch."""
        from rloo_kit import load_config

        file = self.scratch / f"run-{self.backend}-{os.getpid()}.yaml"
        text = RUN.format(
            outputs=json.dumps(str(self.scratch / f"outputs-{self.backend}")),
            name=json.dumps(name or str(self.checkpoint(size))),
            backend=self.backend,
            dtype="float32" if self.rehearsed else "auto",
            four_bit=str(four_bit and not self.interpreted).lower(),
            length=256 if self.rehearsed else MAX_TOKENS,
            rate=TINY_LEARNING_RATE if self.rehearsed else LEARNING_RATE,
        )
        file.write_text(text, encoding="utf-8")
        return load_config(file, *(SMALLER if self.rehearsed else ()), *overrides)

    def load(self, run: Any) -> Any:
        """The policy of a run."""
        from rloo_kit import load_policy

        self.keep_on_cpu()
        policy = load_policy(run)
        self.keep_on_cpu()
        if policy.backend != self.backend:
            raise AssertionError(f"the policy came through {policy.backend}: {policy.reason}")
        return policy

    def policy(self, size: str, four_bit: bool = True, overrides: tuple[str, ...] = ()) -> Any:
        """The policy that several checks use."""
        key = (size, four_bit, overrides)
        return self.shared(key, lambda: self.load(self.make_run(size, *overrides, four_bit=four_bit)))

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, kept for the next check; one with another key is released first, to hold only one."""
        if key not in self._shared:
            self.release()
            self._shared[key] = make()
        return self._shared[key]

    def release(self) -> None:
        """Release what is shared."""
        self._shared.clear()
        memory.settle(self.cuda)

    def keep_on_cpu(self) -> None:
        """Called before and after a load in a rehearsal through Unsloth, which imports modules that look for a GPU."""
        if self.interpreted:
            _interpreter().keep_on_cpu()


def start(backend: str, rehearsed: bool) -> None:
    """Import the libraries in order: Unsloth first if it is the backend, before torch.

    Raises:
        rloo_kit.errors.RlooKitError, ImportError: the backend cannot be used here.
    """
    os.environ["RLOO_KIT_BACKEND"] = backend
    if backend == "unsloth":
        cache = Path(tempfile.mkdtemp(prefix="unsloth-compiled-"))
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache))
        if rehearsed:
            os.environ["UNSLOTH_GRPO_PREFIX_GROUPER"] = "0"  # shared prompts have no backward pass on the CPU
            _interpreter().import_unsloth(cache)
    import rloo_kit
    from rloo_kit._stack import load_stack

    rloo_kit.setup_environment(backend)
    load_stack()


def _interpreter() -> Any:
    return reporting.load_file("tests/with_unsloth/interpreter.py")


# --------------------------------------------------------------------------------------------------- random checkpoints


def make_checkpoint(bench: Bench, size: str) -> Path:
    """Write the random model of a size unless it exists; in a process without Unsloth, whose patches it
    would contain."""
    from rloo_kit.plan.shapes import EMBEDDED, PUBLISHED

    folder = bench.checkpoint_folder(size)
    if folder.is_dir():
        return folder
    made = Path(tempfile.mkdtemp(dir=bench.scratch))  # an interrupted process leaves nothing that looks finished
    if bench.rehearsed:
        shape = replace(EMBEDDED, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_kv_heads=1)
        _save_random_model(shape, made, max_position_embeddings=2048, dtype="float32", initializer_range=0.1)
        _set_end(made, TINY_USUAL_LENGTH)
    else:
        _save_random_model(PUBLISHED[size], made)
        if size == "0.6b":
            _set_end(made, USUAL_LENGTH)
    made.rename(folder)
    return folder


def _save_random_model(shape: Any, folder: Path, **values: Any) -> None:
    """A Qwen3 of this shape with random weights, without special tokens in its config, and a tokenizer of single bytes;
    `values` replace keys of the config."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rloo_kit.data.light_tokenizer import ROWS
    from rloo_kit.demo.embedded import build_tokenizer

    usual = {"max_position_embeddings": 40960, "dtype": "bfloat16"}
    usual |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_parameters={"rope_theta": 1_000_000.0, "rope_type": "default"},
        tie_word_embeddings=shape.tied,
        **usual | values,
    )
    torch.manual_seed(1)  # the rehearsed one ends after 2 to 4 tokens; with 0 after one, which leaves no gradient
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, str(config.dtype).split(".")[-1]))
    model.save_pretrained(folder)
    build_tokenizer("thinking", "qwen3" if shape.vocab_size >= ROWS["qwen3"] else "compact").save_pretrained(folder)


def _set_end(folder: Path, length: int) -> None:
    """Set the end token's row to what the states after a prompt have in common, so that it comes about every `length`
    tokens (twice that with 4-bit weights): random weights draw it once in 151,936."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    weight, draw = model.get_input_embeddings().weight, torch.Generator().manual_seed(0)
    found = []
    with torch.no_grad():
        for left, right in ((841, 27), (12, 345), (677, 58), (90, 9)):
            text = f"<|im_start|>user\n{left}+{right}=<|im_end|>\n<|im_start|>assistant\n<think>\n"
            prompt = tokenizer(text)["input_ids"]
            answer = torch.randint(0, weight.shape[0], (64,), generator=draw)  # like the answers of random weights
            ids = torch.cat([torch.tensor(prompt), answer])[None].to(device)
            found.append(model.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 :].float())
        states = torch.cat(found)
        others = (states @ weight.float().T).logsumexp(dim=1).mean()
        mean = states.mean(dim=0)
        weight[tokenizer.eos_token_id] = (mean * (others - math.log(length)) / mean.square().sum()).to(weight)
    model.save_pretrained(folder)

"""vLLM in this process: Unsloth's, which shares the policy's weights, or one with a copy of the base.

Before each rollout vLLM gets the policy's adapter in memory, as a LoRA. It is never merged into the base: merging into
4-bit weights and unmerging re-quantises them each time. On a GPU vLLM sleeps while the policy is trained.
"""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from peft import get_peft_model_state_dict

from rloo_kit.errors import BackendError
from rloo_kit.images.tokens import Vision
from rloo_kit.models.adapters import find_handover_problem, is_switched_off
from rloo_kit.models.backends import attached, base_of
from rloo_kit.sizes import BATCHED_TOKENS, VLLM_RANKS
from rloo_kit.system.processes import count_processes, hold_signals, is_distributed, keep_random_numbers
from rloo_kit.system.versions import VLLM_INSTALL, is_importable
from rloo_kit.vllm.images import find_vision, image_arguments

CPU_POOL_GIB = "1"  # KV cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE is set

_numbers = count(1)  # of adapters in this process; reusing a name would reuse the other's cached prefixes


@dataclass(frozen=True)
class VllmSettings:
    """vLLM's start-up settings; None is vLLM's default. `max_tokens`: prompt and completion together.
    `gpu_memory_utilization`: share of the GPU for weights, buffers and KV cache. `max_num_seqs`: completions at once.
    `float8_kv_cache`: KV cache in 8 bits. `enforce_eager`: no CUDA graphs. `four_bit`: of the base."""

    max_tokens: int
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    float8_kv_cache: bool = False
    enforce_eager: bool = False
    four_bit: bool = False


class InProcessVllm:
    """A vLLM of this process (`llm`, a `vllm.LLM`). `hand_over` loads the adapter of a PeftModel and returns the
    `LoRARequest` that selects it; `reason` says in one line why this vLLM. `vision`: how it gets images, if it does."""

    def __init__(self, llm: Any, hand_over: Callable[[Any], Any], reason: str, vision: Vision | None = None) -> None:
        self.reason, self.vision = reason, vision
        self.engine: Any = llm.llm_engine  # None once stopped, like the next two
        self._llm: Any = llm
        self._hand_over: Any = hand_over
        settings = self.engine.vllm_config
        self.max_tokens: int = settings.model_config.max_model_len
        self.max_num_seqs: int = settings.scheduler_config.max_num_seqs
        self._sleeps = bool(settings.model_config.enable_sleep_mode) and torch.cuda.is_available()
        self.rest()

    def __str__(self) -> str:
        sleeps = "asleep while the model is trained" if self._sleeps else "always awake"
        return f"{self.reason}; {self.max_tokens} tokens, {self.max_num_seqs} completions at once; {sleeps}"

    def stop(self) -> None:
        """Shut it down and free all its memory."""
        engine, self.engine, self._llm, self._hand_over = self.engine, None, None, None
        if engine is not None:
            engine.engine_core.shutdown()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A block in which vLLM has its memory; training has it afterwards. Raises BackendError once stopped."""
        if self.engine is None:
            raise BackendError(
                "this model's vLLM was stopped when another was started (one per process): load the model again, or "
                "set rollout.engine=generate"
            )
        if self._sleeps and self.engine.is_sleeping():
            torch.cuda.empty_cache()
            with hold_signals():
                self._llm.wake_up()
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Free the memory of the KV cache and of its own weights, if it can sleep."""
        if self._sleeps and self.engine is not None and not self.engine.is_sleeping():
            with hold_signals():
                self._llm.sleep(1)

    def take_adapter(self, model: Any) -> Any:
        """The `LoRARequest` of the current adapter of `model`, loaded for sampling; call only while awake. None (the
        base alone) if it is disabled. Raises BackendError if vLLM cannot represent it."""
        if problem := find_handover_problem(model):
            raise BackendError(problem)
        if is_switched_off(model):
            return None
        try:
            with hold_signals():
                request = self._hand_over(model)
                self._llm.reset_prefix_cache()
        except (ValueError, NotImplementedError) as error:
            raise BackendError(f"vLLM cannot load the adapter: {error}; or set rollout.engine=generate") from error
        return request


def is_running() -> bool:
    """Whether a model of this process has a vLLM."""
    gc.collect()  # reference cycles keep models alive
    return bool(attached)


def adopt_vllm(model: Any, vllm: InProcessVllm) -> InProcessVllm:
    """Attach `vllm` to the model while the model lives; loading a first adapter checks that it can."""
    if vllm.vision is None and find_vision(model) is not None:
        raise BackendError("images were not tried with Unsloth's fast_inference: set rollout.engine=generate")
    with vllm.awake():
        vllm.take_adapter(model)
    attached[base_of(model)] = vllm
    logger = logging.getLogger("transformers.training_args")
    # transformers' advice to use a launcher, which vLLM's process group of one triggers
    logger.addFilter(lambda record: "launch your script with" not in record.getMessage())
    return vllm


def start_vllm(model: Any, settings: VllmSettings) -> InProcessVllm:
    """Start vLLM with a copy of the base of `model`, a PeftModel of transformers, and attach it to the model. Stops
    another model's vLLM: process groups are global to the process, so ending one would end both. Raises BackendError if
    vLLM is missing or does not start, or if it cannot load the adapter of `model`."""
    if problem := find_handover_problem(model):
        raise BackendError(problem)
    if problem := find_vllm_problem():
        raise BackendError(f"rollout.engine is vllm, but {problem}, or set rollout.engine=auto")
    base = base_of(model)
    name = base.config.name_or_path
    if not name:
        raise BackendError(
            "vLLM reads the base from a checkpoint, but this model names none: save it and load it from there, or set "
            "rollout.engine=generate"
        )
    prepare_variables()
    with _keep_process():
        from vllm import LLM
    rank, vision = room_for_rank(model.peft_config["default"].r), find_vision(model)
    arguments = _arguments(base, settings) | image_arguments(model, vision, settings.four_bit)
    if is_running():
        for other in attached.values():
            other.stop()
        attached.clear()
    try:
        with _keep_process():
            llm = LLM(model=name, max_lora_rank=rank, **arguments)
    except (RuntimeError, ValueError, OSError, NotImplementedError) as error:
        raise BackendError(
            f"vLLM does not start with {name}: {error}. Set rollout.engine=generate, or see docs/rollout.md"
        ) from error
    reason = "in this process, with a copy of the base; the adapter is passed in memory"
    return adopt_vllm(model, InProcessVllm(llm, partial(_hand_over, llm), reason, vision))


def find_vllm_problem() -> str | None:
    """Why vLLM cannot be started in this process ("what is wrong: what to do"); None if it can."""
    if not is_importable("vllm"):
        return f"vLLM is not installed: {VLLM_INSTALL}"
    if is_distributed():
        return (
            f"the run has {count_processes()} processes, but vLLM in the trainer's process supports one: start a "
            "server and set rollout.engine=server"
        )
    return None


def prepare_variables() -> None:
    """Before vLLM is imported: run its engine in this process, and log warnings only."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors are passed, not sent
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_POOL_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else the trainer's thread is pinned to one core


@contextmanager
def _keep_process() -> Iterator[None]:
    """Undo side effects of vLLM's import and start: they seed all random number generators with 0, replace
    `torch.set_num_threads` on a CPU, prefix every error with "[rank0]", and freeze live objects for the collector."""
    set_threads, hook = torch.set_num_threads, sys.excepthook
    devices = list(range(torch.cuda.device_count()))
    try:
        with keep_random_numbers(), torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads, sys.excepthook = set_threads, hook
        gc.unfreeze()


def room_for_rank(rank: int) -> int:
    """The smallest maximum rank of vLLM that fits `rank`.

    >>> room_for_rank(4), room_for_rank(16), room_for_rank(17)
    (8, 16, 32)
    """
    if rank > VLLM_RANKS[-1]:
        raise BackendError(f"vLLM loads adapters up to rank {VLLM_RANKS[-1]}, but model.lora.r is {rank}: lower it")
    return next(known for known in VLLM_RANKS if known >= rank)


def _arguments(base: Any, settings: VllmSettings) -> dict[str, Any]:
    """Keywords of `vllm.LLM`; settings that are None keep vLLM's default."""
    arguments: dict[str, Any] = {
        "dtype": str(base.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "max_model_len": settings.max_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_dtype": "fp8" if settings.float8_kv_cache else None,
        "enforce_eager": settings.enforce_eager,
        "enable_lora": True,
        "max_loras": 1,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the sampling distribution
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if base.device.type == "cuda":
        arguments |= {"enable_sleep_mode": True, "max_num_batched_tokens": BATCHED_TOKENS}
        arguments |= {"quantization": "bitsandbytes"} if settings.four_bit else {}
    else:  # on a CPU a seeded request crashes vLLM's engine if its prefill is split
        room = max(BATCHED_TOKENS, settings.max_tokens)
        arguments |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": room}
    return {name: value for name, value in arguments.items() if value is not None}


def _hand_over(llm: Any, model: Any) -> Any:
    """Load the adapter of `model` into the `vllm.LLM` as a LoRA, in memory."""
    from vllm.lora.request import LoRARequest

    number = next(_numbers)
    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    copies = {name: value.detach().clone() for name, value in state.items()}  # vLLM scales one of each pair in place
    settings = model.peft_config["default"].to_dict()
    config = {key: list(value) if isinstance(value, set) else value for key, value in settings.items()}
    llm.collective_rpc(_take_tensors, args=(copies, config, number))
    return LoRARequest(f"policy-{number}", number, "(passed in memory)")


def _take_tensors(worker: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any], number: int) -> None:
    """In vLLM's worker: load an adapter from tensors instead of a folder; drops the previous adapter.

    Raises:
        ValueError: vLLM has no room or no kernel for the adapter.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    loras = worker.model_runner.lora_manager
    manager = loras._adapter_manager
    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(loras.lora_config)
    fused = manager.packed_modules_mapping  # q, k and v are one layer there; gate and up too
    known = {part for name in manager.supported_lora_modules for part in (name, *fused.get(name, ()))}
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    if unknown := adapted - known:
        raise ValueError(f"it has no LoRA for the layers {', '.join(sorted(unknown))}; set model.lora.target_modules")
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)  # from transformers' names, without fusing layers
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # in whichever vLLM version
        if callable(method := getattr(mapper, name, None)):
            mapper = method()
            break
    lora = LoRAModel.from_lora_tensors(
        number,
        tensors,
        helper,
        device=str(next(iter(tensors.values())).device),
        dtype=loras.lora_config.lora_dtype,
        model_vocab_size=loras.vocab_size,
        weights_mapper=mapper,
    )
    manager.remove_all_adapters()
    manager.add_adapter(lora)
    manager.activate_adapter(number)

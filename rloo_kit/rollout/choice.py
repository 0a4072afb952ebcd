"""Which engine samples.

Every engine samples from the policy's whole distribution (unless `Filters` truncate it), follows the same budget rules
and returns the model's own ids.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rloo_kit.errors import BackendError
from rloo_kit.models.adapters import find_handover_problem
from rloo_kit.models.backends import find_other_layers, find_vllm, load_backend, why_without
from rloo_kit.rollout.engine import Engine, Sampling
from rloo_kit.rollout.generate import GenerateEngine
from rloo_kit.rollout.native import NativeEngine, walks_layers
from rloo_kit.rollout.types import WHOLE, Filters
from rloo_kit.seams import part

NATIVE_REASON = "no padding, and rows that have ended are dropped"
USUAL_TOKENS = 8192  # of a prompt and its completion, if no setting gives a limit
ALIBI = ("bloom", "mpt")
# Modules whose functions end up in transformers' `generate`. A class of transformers.models with its own does not.
PLAIN = ("transformers.generation", "torch", "peft", "accelerate")
MASKED_ATTENTION = ("sdpa", "eager", "rloo_packed")  # these take the native loop's 4-D mask

_measured: "WeakKeyDictionary[Any, tuple[str, str]]" = WeakKeyDictionary()  # by model: the faster engine, and the times


def prefer_engine(model: Any, name: str, reason: str) -> None:
    """Let `rollout.engine: auto` take this engine for `model`, because it was measured to be the faster one."""
    _measured[model] = name, reason


def resolve_engine(wanted: str, backend: str, model: Any) -> tuple[str, str]:
    """The engine's name and the reason for it, for `rollout.engine` = `wanted`.

    Args:
        backend: "unsloth" or "transformers". model: the policy's.

    Raises:
        BackendError: an engine that cannot be used here.
    """
    is_unsloth = backend == "unsloth"
    module = None if is_unsloth else _find_own_generate(model)  # Unsloth's is a patch itself
    if wanted == "auto":
        if module is None and find_vllm(model) is not None:
            return "vllm", "the model was loaded with it"
        why_not = f"; {why}" if (why := why_without(model)) and model.device.type == "cuda" else ""
        if module is not None:
            return "generate", f"the model's own generate ({module}) is called"
        obstacle = _native_obstacle(model, backend)
        if not obstacle and model in _measured:
            return _measured[model]
        name, reason = ("generate", obstacle) if obstacle else ("native", NATIVE_REASON)
        return name, f"{reason}{why_not}"
    if wanted == "native" and (why := _native_obstacle(model, backend)):
        raise BackendError(f"rollout.engine is native, but {why}: set rollout.engine=generate")
    if wanted == "vllm" and find_vllm(model) is None:
        if problem := find_handover_problem(model):
            raise BackendError(problem)
        problem = part("vllm").find_vllm_problem()
        if problem is None and is_unsloth:
            problem = "Unsloth loaded the model without it: load it again, by load_policy or with fast_inference=True"
        if problem:
            raise BackendError(f"rollout.engine is vllm, but {problem}, or set rollout.engine=auto")
    bypassed = f"; the model's own generate ({module}) is not called" if module and wanted != "generate" else ""
    return wanted, f"rollout.engine asks for it{bypassed}"


def _find_own_generate(model: Any) -> str | None:
    """The module of a `generate` that was patched, on the model or on a class, or that its class defines, which the
    native loop would bypass; None if it is transformers' own."""
    for owner in (model, model.get_base_model() if hasattr(model, "get_base_model") else model):
        function: Any = getattr(owner, "generate", None)
        while function is not None:  # a decorator may hide the function it wraps, or be the patch
            module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
            if not any(module == name or module.startswith(f"{name}.") for name in PLAIN):
                return str(module)
            function = getattr(function, "__wrapped__", None)
    return None


def _native_obstacle(model: Any, backend: str) -> str | None:
    """Why the native engine cannot sample from this model; None if it can."""
    config = model.config.get_text_config()
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        return "its adapter adds virtual tokens"
    windows = getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
    if windows or find_other_layers(model):
        return f"{config.model_type} has layers that do not attend to all tokens"
    if model.config.is_encoder_decoder:
        return f"{config.model_type} has an encoder"
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        return f"{config.model_type} derives positions from its own mask"
    if backend == "unsloth":  # which replaces the attention that a step through the modules would need
        if not walks_layers(model, load_backend(backend).inference_mode):
            return "Unsloth's fast inference runs inside generate, and the kit's decoder does not support this model"
        return None
    attention = model.config._attn_implementation
    if attention not in MASKED_ATTENTION:
        return f"its attention, {attention}, does not take a mask for each row's own length"
    return None


def build_engine(
    model: Any,
    engine: str = "auto",
    *,
    backend: str = "transformers",
    temperature: float,
    end_ids: Sequence[int],
    pad_id: int,
    rows: int | None = None,
    server: Any = None,
    vllm: Any = None,
    filters: Filters = WHOLE,
    say: Callable[[str], None] = print,
) -> Engine:
    """The engine that samples from `model`; raises as `resolve_engine` does.

    Args:
        model: a PeftModel or a causal language model, without DDP or accelerate around it; in any mode.
        engine: `rollout.engine`: auto, native, generate, vllm or server.
        backend: "unsloth" or "transformers", whichever loaded the model.
        temperature, end_ids, rows, filters, say: see `Sampling`. pad_id: pads rows; it never reaches a result.
        server: the `ServerSettings` of the engine "server": where it samples, and how it gets the adapter.
        vllm: `VllmSettings` to start vLLM with for the engine "vllm", unless the model was loaded with it.
    """
    sampling = Sampling(temperature, tuple(end_ids), rows, filters, say)
    name, reason = resolve_engine(engine, backend, model)
    mode = partial(load_backend(backend).inference_mode, model)
    if name == "native":
        return NativeEngine(model, mode, reason, sampling)
    if name == "generate":
        return GenerateEngine(model, mode, reason, sampling, pad_id)
    if name == "vllm":
        if (started := find_vllm(model)) is None:
            positions = model.config.get_text_config().max_position_embeddings
            settings = vllm or part("vllm").VllmSettings(min(USUAL_TOKENS, positions))
            started = part("vllm").start_vllm(model, settings)
        return part("engines").VllmEngine(model, started, sampling)
    if server is None:
        raise BackendError("rollout.engine is server, but no server was named: set rollout.server_url=http://host:port")
    return part("engines").ServerEngine(server, reason, sampling)

"""Which engine can keep a rollout's keys and values how (`rollout.cache`), and what to use where it cannot.

    plain      in the model's precision, on the device: every engine
    int8       8 bits: native (its own); generate with transformers, by the library's quantised cache and hqq
    offloaded  in the machine's memory: native; generate with transformers on a GPU, by the library

The others hold keys and values in their own ways: Unsloth's generate in 16-bit buffers that it decodes from, the
continuous engine in pages, vLLM in a pool whose precision its own switch sets. Left out: the caches themselves
(`slot_cache`, `slot_cache_kinds`).
"""

from importlib.util import find_spec
from typing import Any

from rloo_kit.config.checks import CACHES
from rloo_kit.errors import BackendError, ConfigError

HQQ_CONFIG = {"backend": "hqq", "nbits": 8, "q_group_size": 64, "axis_key": 1, "axis_value": 1}

_ROWS = "set rollout.cache=plain (rollout.rows lowers what is held at once)"
_ELSEWHERE = {
    "continuous": f"the continuous engine pages its cache itself and takes no other kind: {_ROWS}",
    "vllm": f"vLLM sizes its own pool of keys and values, and makes them 8-bit by its own kv_cache_dtype: {_ROWS}",
    "server": f"the server holds the keys and values (vllm serve --kv-cache-dtype fp8 makes them 8-bit): {_ROWS}",
}


def check_cache(cache: str, engine: str, backend: str, on_cuda: bool) -> None:
    """Refuse a cache that the engine cannot keep.

    Args:
        cache: `rollout.cache`. engine: the name that was chosen. backend: "unsloth" or "transformers".
        on_cuda: whether the model lies on a GPU.

    Raises:
        ConfigError: no such cache. BackendError: not with this engine, or a library is missing; the text says what to
            set.

    >>> check_cache("int8", "native", "transformers", on_cuda=False)
    >>> check_cache("int8", "continuous", "transformers", on_cuda=True)
    Traceback (most recent call last):
        ...
    rloo_kit.errors.BackendError: rollout.cache is int8, but the continuous engine pages its cache itself and takes \
no other kind: set rollout.cache=plain (rollout.rows lowers what is held at once)
    """
    if cache not in CACHES:
        raise ConfigError(f"rollout.cache is {cache!r}; it is one of {', '.join(CACHES)}")
    if cache == "plain" or engine == "native":
        return
    obstacle = _ELSEWHERE.get(engine) or _generate_obstacle(cache, backend, on_cuda)
    if obstacle:
        raise BackendError(f"rollout.cache is {cache}, but {obstacle}")


def _generate_obstacle(cache: str, backend: str, on_cuda: bool) -> str | None:
    if backend == "unsloth":
        return (
            "Unsloth decodes from 16-bit buffers of its own on the GPU: set rollout.cache=plain (rollout.rows lowers "
            "what is held at once), or model.backend=transformers, whose native engine has this cache"
        )
    if cache == "int8" and find_spec("hqq") is None:
        return (
            "the generate engine takes the 8-bit cache of hqq, which is not installed: pip install hqq, or set "
            "rollout.engine=native, which has its own, where the model allows it"
        )
    if cache == "offloaded" and not on_cuda:
        return "the model is not on a GPU, so its cache is in the machine's memory already: set rollout.cache=plain"
    return None


def generate_options(cache: str) -> dict[str, Any]:
    """What `model.generate` is called with for a cache that `check_cache` let pass."""
    if cache == "int8":
        return {"cache_implementation": "quantized", "cache_config": dict(HQQ_CONFIG)}
    return {"cache_implementation": "offloaded"} if cache == "offloaded" else {}

"""The two backends, Unsloth and transformers + PEFT, and what is asked of a model whichever of them loaded it.

A backend is a module with three functions: `load`, `inference_mode` and `config_arguments`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from rloo_kit.system.processes import is_main_process

# By the base model: the vLLM that samples for it in this process (`vllm.in_process`), or why there is none.
attached: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
_absent: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()

_MODULES = {"unsloth": "rloo_kit.models.unsloth", "transformers": "rloo_kit.models.transformers"}


def load_backend(name: str) -> Any:
    """The module of a backend."""
    return import_module(_MODULES[name])


def base_of(model: Any) -> Any:
    """The model below an adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def remember_absence(model: Any, reason: str) -> None:
    """Record why `load_policy` loaded this model without vLLM."""
    _absent[base_of(model)] = reason


def why_without(model: Any) -> str | None:
    """What `remember_absence` recorded."""
    return _absent.get(base_of(model))


def find_vllm(model: Any) -> Any:
    """The `InProcessVllm` that `load_policy` or Unsloth started with `model`; None if there is none."""
    found = attached.get(base_of(model))
    if found is None and getattr(model, "vllm_engine", None) is not None:
        found = load_backend("unsloth").adopt_engine(model)
    return found


@contextmanager
def keep_settings(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Wrap the trainer's constructor, which gets `arguments`: restore what a backend's version changes in the config
    and the tokenizer, and print it in one line together with what `keep_values` found."""
    args, model = arguments.get("args"), arguments.get("model")
    tokenizer: Any = arguments.get("processing_class")
    guard = load_backend("unsloth").keep_arguments(args, model) if _unsloth_is_there() else nullcontext([])
    side: str | None = getattr(tokenizer, "padding_side", None)
    with guard as changes:
        yield
    changes = [*getattr(args, "_changes", ()), *changes]
    if side is not None and tokenizer.padding_side != side:
        changes.append(f"padding_side {side} (Unsloth: {tokenizer.padding_side})")
        tokenizer.padding_side = side
    if changes and is_main_process():
        print(f"kept settings that Unsloth would change: {', '.join(changes)}", flush=True)


def keep_values(config: Any, stock: type, values: dict[str, Any]) -> None:
    """After the config's constructor, which got `values`: restore what a backend's version of TRL's class `stock`
    changes."""
    if _unsloth_is_there():
        config._changes = load_backend("unsloth").set_back(config, stock, values)  # printed by keep_settings


def packed_keywords(model: Any) -> Any:
    """`function(laid, layout)`, which returns the keywords for a packed row, if the model has Unsloth's layers; None
    for any other model. `Scorer` checks that the layers accept them."""
    return load_backend("unsloth").packed_keywords if has_unsloths_layers(model) else None


def has_unsloths_layers(model: Any) -> bool:
    """Whether Unsloth's forward has replaced that of the model's layers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base.base_model).forward.__module__.startswith("unsloth.")


def is_coarse(model: Any) -> bool:
    """Whether rounding is that of 16 bits or fewer."""
    return model.get_input_embeddings().weight.dtype.itemsize == 2 or getattr(model, "is_loaded_in_4bit", False)


def find_other_layers(model: Any) -> str:
    """The kinds of layers, by name, in which a token does not attend to all tokens before it: those with a window, or
    with a state along the row (Mamba, gated delta net, short convolution); empty if there are none."""
    config = model.config.get_text_config()
    listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # GPT-Neo's
    kinds = set(listed or ()) - {"full_attention", "global"}
    if not kinds and getattr(model, "_is_stateful", False):
        kinds = {"recurrent"}
    return ", ".join(sorted(kinds))


def _unsloth_is_there() -> bool:
    """Whether Unsloth was imported, whatever loaded the model: TRL's trainer is then Unsloth's."""
    return sys.modules.get("unsloth") is not None

"""Detects a model's own `generate`, which the kit's native loop would bypass."""

from typing import Any

# Modules whose functions end up in transformers' `generate`. A class of transformers.models with its own does not.
PLAIN = ("transformers.generation", "torch", "peft", "accelerate")


def find_own_generate(model: Any) -> str | None:
    """The module of a `generate` that was patched, on the model or on a class, or that its class defines; None if it is
    transformers' own.

    Args:
        model: a PeftModel or a causal language model.
    """
    for part in (model, model.get_base_model() if hasattr(model, "get_base_model") else model):
        found: Any = getattr(part, "generate", None)
        while found is not None:  # a decorator may hide the function it wraps, or be the patch
            module = getattr(found, "__globals__", {}).get("__name__") or type(found).__module__
            if not any(module == name or module.startswith(f"{name}.") for name in PLAIN):
                return str(module)
            found = getattr(found, "__wrapped__", None)
    return None

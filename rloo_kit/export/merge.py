"""The weights that a trained policy computes with, as plain tensors: its base, dequantised, with the adapter added.

Tensors are read one at a time in float32 from the loaded policy, so the whole model is never in float32. A 4-bit base
is the one that was trained on; on the original 16-bit weights the adapter gives a different model.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rloo_kit.errors import ExportError
from rloo_kit.models.adapters import find_beyond_lora

ADAPTER = "default"
_INNER = ".base_layer"  # PEFT's name for the module that an adapter wraps


@dataclass(frozen=True)
class Weight:
    """One tensor of the merged model, read on demand."""

    name: str  # in transformers
    shape: tuple[int, ...]  # unpacked, even if the base has it in 4-bit
    value: torch.Tensor = field(repr=False)
    layer: Any = field(repr=False, default=None)  # PEFT's LoRA layer around it

    def read(self) -> torch.Tensor:
        """The merged tensor in float32 on the CPU."""
        merged = self.value
        if (state := getattr(merged, "quant_state", None)) is not None:
            from bitsandbytes.functional import dequantize_4bit

            merged = dequantize_4bit(merged.data, state)
        merged = merged.detach().to("cpu", torch.float32)
        if self.layer is None:
            return merged
        first, second = (getattr(self.layer, name)[ADAPTER].weight for name in ("lora_A", "lora_B"))
        first, second = (matrix.detach().to("cpu", torch.float32) for matrix in (first, second))
        return merged + self.layer.scaling[ADAPTER] * (second @ first)


def list_weights(model: Any) -> list[Weight]:
    """All merged weights of a policy's model in the model's order, tied ones once. Raises ExportError if the adapter is
    not just a LoRA of linear layers."""
    base = model
    if hasattr(model, "peft_config"):
        base, beyond = model.get_base_model(), find_beyond_lora(model.peft_config[ADAPTER])
        if any("lora_embedding_A." in name for name, _ in model.named_parameters()):
            beyond = beyond or "changes the embedding"
        if beyond:
            raise ExportError(
                f"this adapter {beyond}, and the kit merges only a LoRA of linear layers: use rloo-kit export --to "
                "adapter, then PEFT's merge_and_unload"
            )
    modules, seen, found = dict(base.named_modules()), set(), []
    for name, module in modules.items():
        if ".lora_" in name:
            continue
        outer = name.removesuffix(_INNER)
        layer = modules[outer] if name != outer else None
        for leaf, value in module.named_parameters(recurse=False):
            if id(value) not in seen:
                seen.add(id(value))
                is_merged = layer is not None and leaf == "weight" and ADAPTER in layer.lora_A
                shape = tuple((getattr(value, "quant_state", None) or value).shape)
                found.append(Weight(f"{outer}.{leaf}", shape, value, layer if is_merged else None))
    return found


def compare_shards(weights: list[Weight], folder: Path, dtype: torch.dtype) -> int:
    """Check that the files of `folder` contain all tensors, bit for bit; returns their number. Raises ExportError with
    the first that differs."""
    wanted = {weight.name: weight for weight in weights}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                weight = wanted.pop(name, None)
                if weight is None or not torch.equal(opened.get_tensor(name), weight.read().to(dtype)):
                    raise ExportError(
                        f"{folder}: the tensor {name} differs from the trained one, so the export is not published"
                    )
    if wanted:
        raise ExportError(f"{folder}: the tensor {next(iter(wanted))} is missing, so the export is not published")
    return len(weights)

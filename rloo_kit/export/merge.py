"""The weights that a trained policy computes with, as plain tensors: its base, dequantised, with the adapter added.

Tensors are read one at a time in float32 from the loaded policy, so the whole model is never in float32. A 4-bit base
is the one that was trained on; on the original 16-bit weights the adapter gives a different model.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rloo_kit.errors import ExportError
from rloo_kit.models.adapters import MORE_THAN_MATRICES, follow_umask

ADAPTER = "default"
SHARD_BYTES = 2 * 2**30
_INNER = ".base_layer"  # PEFT's name for the module that an adapter wraps


@dataclass(frozen=True)
class Weight:
    """One tensor of the merged model, read on demand.

    Attributes:
        name: in transformers. shape: unpacked, even if the base has it in 4-bit.
    """

    name: str
    shape: tuple[int, ...]
    value: torch.Tensor = field(repr=False)
    layer: Any = field(repr=False, default=None)  # PEFT's LoRA layer around it

    def read(self) -> torch.Tensor:
        """The merged tensor in float32 on the CPU."""
        merged = _dequantise(self.value).detach().to("cpu", torch.float32)
        if self.layer is None:
            return merged
        first, second = (getattr(self.layer, name)[ADAPTER].weight for name in ("lora_A", "lora_B"))
        first, second = (matrix.detach().to("cpu", torch.float32) for matrix in (first, second))
        return merged + self.layer.scaling[ADAPTER] * (second @ first)


def list_weights(model: Any) -> list[Weight]:
    """All merged weights of a policy's model in the model's order, tied ones once. Raises ExportError if the adapter is
    not just a LoRA of linear layers."""
    _refuse_other_adapters(model)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
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
                found.append(Weight(f"{outer}.{leaf}", _shape(value), value, layer if is_merged else None))
    return found


def write_shards(weights: list[Weight], folder: Path, dtype: torch.dtype, largest: int = SHARD_BYTES) -> None:
    """Write `model*.safetensors` of at most `largest` bytes each (or one tensor), cast after merging."""
    groups: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        bytes_ = prod(weight.shape) * dtype.itemsize
        if groups[-1] and size + bytes_ > largest:
            groups.append([])
            size = 0
        groups[-1].append(weight)
        size += bytes_
    places: dict[str, str] = {}
    total = sum(prod(weight.shape) for weight in weights) * dtype.itemsize
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({one.name: one.read().to(dtype).contiguous() for one in group}, folder / name, {"format": "pt"})
        places |= dict.fromkeys([one.name for one in group], name)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    follow_umask(folder)


def read_shards(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that `write_shards` wrote, read back from the files."""
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                yield name, opened.get_tensor(name)


def compare_shards(weights: list[Weight], folder: Path, dtype: torch.dtype) -> int:
    """Check that the files of `folder` contain all tensors, bit for bit; returns their number. Raises ExportError with
    the first that differs."""
    wanted = {weight.name: weight for weight in weights}
    for name, found in read_shards(folder):
        weight = wanted.pop(name, None)
        if weight is None or not torch.equal(found, weight.read().to(dtype)):
            raise ExportError(
                f"{folder}: the tensor {name} differs from the trained one, so the export is not published"
            )
    if wanted:
        raise ExportError(f"{folder}: the tensor {next(iter(wanted))} is missing, so the export is not published")
    return len(weights)


def _refuse_other_adapters(model: Any) -> None:
    config = getattr(model, "peft_config", {}).get(ADAPTER)
    if config is None:
        return
    found = ""
    if config.peft_type != "LORA":
        found = f"is of the type {config.peft_type.value}"
    elif getattr(config, "use_dora", False):
        found = "uses DoRA"
    elif config.bias != "none" or any(getattr(config, name, None) for name in MORE_THAN_MATRICES):
        found = "trains biases, whole modules (modules_to_save), rows of the embedding or bare parameters too"
    elif any("lora_embedding_A." in name for name, _ in model.named_parameters()):
        found = "changes the embedding"
    if found:
        raise ExportError(
            f"this adapter {found}, and the kit merges only a LoRA of linear layers: use rloo-kit export --to adapter, "
            "then PEFT's merge_and_unload"
        )


def _dequantise(value: torch.Tensor) -> torch.Tensor:
    state = getattr(value, "quant_state", None)
    if state is None:
        return value
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(value.data, state)


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    state = getattr(value, "quant_state", None)
    return tuple(value.shape if state is None else state.shape)

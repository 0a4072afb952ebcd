"""Write the adapter that is being trained into a folder, for another process to read: whole, wherever its parts lie.

With one card and with DDP every process has all of it. Where weights are sharded the adapter's own tensors are put
together (FSDP 2, ZeRO-3), which every process has to take part in; the base, which may be a hundred times as large, is
left where it is. The main process alone writes.

Left out: FSDP 1 (`parallel`), models without an adapter; the tokenizer, which a server has from its own checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model

from rloo_kit.errors import ConfigError
from rloo_kit.models.policy import ADAPTER_ALONE

NO_ADAPTER = (
    "rollout.engine is server, which is handed an adapter, but every parameter is trained here: train an adapter "
    "(model.lora, or peft_config), or set rollout.engine=auto"
)


def write_adapter(accelerator: Any, model: torch.nn.Module, folder: Path) -> None:
    """Write the adapter of `model` into `folder` as PEFT does (`adapter_model.safetensors`, `adapter_config.json`).

    Args:
        accelerator: the trainer's. model: the policy, wrapped or not. folder: a new one; called by every process,
            made and filled by the main one.

    Raises:
        ConfigError: the model has no adapter.
    """
    policy = accelerator.unwrap_model(model)
    if not is_peft_model(policy):
        raise ConfigError(NO_ADAPTER)
    gathered = gather_adapter(accelerator, policy)
    if accelerator.is_main_process:
        folder.mkdir(parents=True)
        state = {} if gathered is None else {"state_dict": gathered}
        policy.save_pretrained(str(folder), **ADAPTER_ALONE, **state)


def gather_adapter(accelerator: Any, policy: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """The adapter's tensors by name where processes hold parts of them; None where this one holds all."""
    trained = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trained.values())):  # does nothing below stage 3
            return {name: value.detach().cpu().clone() for name, value in trained.items()}
    if accelerator.distributed_type != DistributedType.FSDP:
        return None
    return {name: _whole(value.detach()).cpu() for name, value in trained.items()}


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor that FSDP 2 sharded; the outermost module's stay whole between two passes."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value

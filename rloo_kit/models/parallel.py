"""How several processes compute one gradient, and how each gets the whole weights for sampling.

Replicas (DDP): each runs its own passes on the bare model; gradients are averaged once, after the step's last pass.
Shards (FSDP 2): all run equally many passes (`equalize`) and the library averages after each.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, gather, gather_object
from torch.distributed.fsdp import FSDPModule

from rloo_kit.errors import ConfigError
from rloo_kit.models.adapters import gather_adapter


class Parallel:
    """The processes of a run as the trainer's steps see them; `kind` is "single", "replicas" or "shards". Raises
    ConfigError if the launch file asks for FSDP 1 or DeepSpeed."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self._began = False
        kind = accelerator.distributed_type
        if kind == DistributedType.DEEPSPEED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
            asked = "DeepSpeed" if kind == DistributedType.DEEPSPEED else "FSDP 1"
            raise ConfigError(
                f"the launch file asks for {asked}; the kit shards with FSDP 2: take configs/accelerate/fsdp2.yaml"
            )
        self.kind = "single" if accelerator.num_processes == 1 else "replicas"
        if kind == DistributedType.FSDP:
            self.kind = "shards"

    def describe(self) -> str:
        """One line: how many processes, and what each has."""
        count = self.accelerator.num_processes
        if self.kind == "single":
            return "one process"
        if self.kind == "replicas":
            return f"{count} with a copy of the model each; gradients are averaged once per step"
        return f"{count} with a shard of the model each (FSDP 2); whole weights are gathered for sampling"

    def rows(self, count: int) -> slice:
        """This process's rows among those of all, if each process has `count`."""
        first = self.accelerator.process_index * count
        return slice(first, first + count)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(B, ...) of this process -> (A, ...) of all, in process order; all processes call it together."""
        return gather(values)

    def gather_list(self, values: list[Any]) -> list[Any]:
        """`gather` for a list of picklable objects."""
        return gather_object(values)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.kind == "single":
            return flag
        return bool(self.gather(torch.tensor([flag], device=self.accelerator.device)).any())

    def model_of_passes(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model that a pass calls: the bare one for replicas, the wrapped one for shards."""
        if self.kind == "shards":
            return model
        return self.accelerator.unwrap_model(model, keep_torch_compile=True)

    def equalize(self, passes: int) -> int:
        """Passes that this process must run: for shards the maximum over all processes, else `passes`."""
        if self.kind != "shards":
            return passes
        most = torch.tensor([passes], device=self.accelerator.device)
        return int(self.accelerator.gather(most).max())

    def average_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Average every `grad` over the processes, before gradients are clipped; a missing one counts as 0."""
        if self.kind != "replicas":
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sums = [torch.distributed.all_reduce(parameter.grad, async_op=True) for parameter in parameters]
        for parameter, total in zip(parameters, sums, strict=True):
            total.wait()
            parameter.grad /= self.accelerator.num_processes

    @contextmanager
    def whole_weights(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The bare model with all its weights in this process, for sampling without the others; no training inside.
        Shards are gathered during the block, so each GPU needs room for the whole model."""
        if self.kind != "shards":
            yield self.accelerator.unwrap_model(model)
        else:
            if not self._began:  # FSDP determines its root in the first call, which must be on the whole model
                self._began = True
                with torch.no_grad():
                    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.accelerator.device))
            with _unsharded(model, self.accelerator.state.fsdp_plugin.reshard_after_forward):
                yield model


class Sharding:
    """The weights of a trainer's model, sharded over the processes; all of them call each method together."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def whole_weights(self) -> AbstractContextManager[Any]:
        """A block in which each process has all weights."""
        return self.trainer.rloo.parallel.whole_weights(self.trainer.model_wrapped)

    def state_dict(self) -> dict[str, Any]:
        """The adapter, or every parameter if there is none, in the main process: 32B in bf16 take 61 GiB there."""
        accelerator, model = self.trainer.accelerator, self.trainer.model
        if not hasattr(model, "peft_config"):
            return accelerator.get_state_dict(self.trainer.model_wrapped)
        return gather_adapter(accelerator, model) or {}


def local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """This process's part of each tensor: the local shard of a sharded one, any other unchanged."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


@contextmanager
def _unsharded(model: torch.nn.Module, reshard_layers: bool) -> Iterator[None]:
    """Gather all weights of an FSDP 2 model; its forward passes leave them gathered."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers = [module for module in sharded if module is not model and any(True for _ in module.children())]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
        for module in layers:  # root, embedding and head stay gathered between the two passes of a step anyway
            module.set_reshard_after_forward(bool(reshard_layers), recurse=False)

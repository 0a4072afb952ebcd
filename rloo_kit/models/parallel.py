"""How several processes make one gradient, and how each of them gets whole weights to sample from.

Replicas (DDP): each makes its own passes on the bare model; gradients are averaged once, after the step's last pass.
Shards (FSDP2, ZeRO-3): all make equally many passes (`equalize`); the library averages pass by pass, and DeepSpeed
steps with the last backward pass, so a step with a NaN is counted there and not dropped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, gather, gather_object
from torch.distributed.fsdp import FSDPModule
from trl.models.utils import unwrap_model_for_generation

from rloo_kit.errors import ConfigError

BUCKET_ELEMENTS = 2**24  # averaged at once: 64 MiB of float32


class Parallel:
    """The processes of a run as the trainer's steps see them; `kind` is "single", "replicas" or "shards".

    Raises: ConfigError for FSDP of the first version.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self._began = False
        self._uses_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        if is_fsdp and not accelerator.is_fsdp2:
            raise ConfigError("the launch file asks for FSDP 1; the kit shards with FSDP 2: set fsdp_version: 2 in it")
        self.kind = "single" if accelerator.num_processes == 1 else "replicas"
        if is_fsdp or self._uses_deepspeed:
            self.kind = "shards"

    def describe(self) -> str:
        """One line: how many processes, and what each of them holds."""
        count = self.accelerator.num_processes
        if self.kind == "single":
            return "one process"
        if self.kind == "replicas":
            return f"{count} with a copy of the model each; gradients are averaged once a step"
        how = "DeepSpeed ZeRO" if self._uses_deepspeed else "FSDP 2"
        return f"{count} with a share of the model each ({how}); whole weights are gathered to sample"

    def rows(self, count: int) -> slice:
        """Where this process's rows lie among those of all, if each process has `count`."""
        first = self.accelerator.process_index * count
        return slice(first, first + count)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(B, ...) of this process -> (A, ...) of all, in their order; called by all of them at once."""
        return gather(values)

    def gather_list(self, values: list[Any]) -> list[Any]:
        """The same for a list of anything that pickles."""
        return gather_object(values)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.kind == "single":
            return flag
        return bool(self.gather(torch.tensor([flag], device=self.accelerator.device)).any())

    def model_of_passes(self, model: torch.nn.Module) -> torch.nn.Module:
        """What the passes call: the bare model of a replica, the wrapped one of a shard."""
        if self.kind == "shards":
            return model
        return self.accelerator.unwrap_model(model, keep_torch_compile=True)

    def equalize(self, passes: int) -> int:
        """Passes that every process has to make: of shards the largest number of any, else its own."""
        if self.kind != "shards":
            return passes
        most = torch.tensor([passes], device=self.accelerator.device)
        return int(self.accelerator.gather(most).max())

    def backward(self, loss: torch.Tensor) -> None:
        """Of a pass that is not the step's last one; `loss` is scaled as the trainer's own."""
        if not self._uses_deepspeed:
            self.accelerator.backward(loss)
            return
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        engine.set_gradient_accumulation_boundary(is_boundary=False)  # else its optimizer would step here
        engine.backward(loss, scale_wrt_gas=False)

    def average_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """The mean over the processes into every `grad`, before gradients are clipped; a missing one counts as 0."""
        if self.kind != "replicas":
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in parameters]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            torch.distributed.all_reduce(flat)
            flat /= self.accelerator.num_processes
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    @contextmanager
    def whole_weights(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The bare model with all its weights in this process, for sampling at its own pace; nothing is trained in it.
        Shards are gathered for the time of the block: a GPU has to hold the whole model then."""
        if self.kind != "shards":
            yield self.accelerator.unwrap_model(model)
        elif self._uses_deepspeed:
            with unwrap_model_for_generation(model, self.accelerator) as whole:
                yield whole
        else:
            if not self._began:  # FSDP finds its root in the first call, which has to be one of the whole model
                self._began = True
                with torch.no_grad():
                    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.accelerator.device))
            with _unsharded(model, self.accelerator.state.fsdp_plugin.reshard_after_forward):
                yield model


def local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What this process holds of each tensor: a part of a sharded one, any other as it is."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type and device, up to BUCKET_ELEMENTS together; the same cut in every process."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        fits = not bucket or (
            size + gradient.numel() <= BUCKET_ELEMENTS
            and (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        )
        if not fits:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


@contextmanager
def _unsharded(model: torch.nn.Module, reshard_layers: bool) -> Iterator[None]:
    """All weights of an FSDP 2 model gathered, and left so by its forward passes."""
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
        for module in layers:  # root, embedding and head are kept between the two passes of a step anyway
            module.set_reshard_after_forward(bool(reshard_layers), recurse=False)

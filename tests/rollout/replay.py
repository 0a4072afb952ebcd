"""A stand-in for a CUDA graph: operations are recorded with their tensors and done again on the same ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Records operations with the tensors that they read and wrote. A host read has no place in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
        found = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        """Do the same to the same tensors: results go where the recorded ones are, views stay."""
        for function, args, kwargs, before in self.operations:
            aliases = [part.alias_info is not None for part in function._schema.returns]
            if all(aliases) and not function._schema.is_mutable:
                continue  # a view
            found = function(*args, **kwargs)
            for old, new, is_alias in zip(tree_leaves(before), tree_leaves(found), aliases, strict=False):
                if isinstance(old, torch.Tensor) and not is_alias:
                    old.copy_(new)

    def outside(self) -> list[int]:
        """Addresses of what it reads and writes and has not made, in order."""
        made, found = set[int](), list[int]()
        for _, args, kwargs, results in self.operations:
            for tensor in tree_leaves((args, kwargs)):
                is_tensor = isinstance(tensor, torch.Tensor) and tensor.dim()  # a number is part of the operation
                if is_tensor and tensor.untyped_storage().data_ptr() not in made:
                    found.append(tensor.data_ptr())
            given = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
            for tensor in tree_leaves(results):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                    made.add(tensor.untyped_storage().data_ptr())
        return found


def record(function: Callable[[], None], _pool: Any = None) -> Callable[[], None]:
    with Recording() as recording:
        function()
    return recording.replay

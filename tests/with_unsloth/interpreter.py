"""Unsloth without an accelerator: its own code, with Triton's interpreter in the place of the GPU compiler.

    from interpreter import import_unsloth
    unsloth = import_unsloth(cache_folder)        # before torch, transformers, trl or peft

What is real: the models, the kernels (interpreted one program at a time, so minutes where a GPU takes milliseconds),
LoRA, generation, checkpointing, saving, and the RLOO trainer and config that Unsloth writes. What is faked is the edge
to the driver, in three places: what torch.cuda says about the GPU, the handle of the stream that kernels are launched
on, and the device under which Unsloth files its own tensors. Not covered: 4-bit weights (they load as plain layers
here), bfloat16, flash attention, checkpoints moved to the host's memory (from 512 tokens on), compiled graphs, vLLM.

It is written for the versions in `requirements-no-deps.txt`, for Triton from 3.6 on, and for an environment without
torchvision or with one whose operators load.
"""

import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

GIB = 2**30
SWITCHES = {
    "TRITON_INTERPRET": "1",  # read when triton is imported
    "UNSLOTH_ALLOW_CPU": "1",  # lets the import pass
    "UNSLOTH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_DISABLE_PINNED_MEMORY": "1",  # a driver's; so is the stream of the second buffer
    "UNSLOTH_DISABLE_DOUBLE_BUFFER": "1",
}
GPU = SimpleNamespace(
    name="interpreter", major=8, minor=0, total_memory=16 * GIB, multi_processor_count=1, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=166912,
)  # fmt: skip


class _AnyIndex(list):
    """A list of one entry for the one device, whatever index a tensor's device gives (None for a CPU tensor)."""

    def __getitem__(self, _index: Any) -> Any:
        return super().__getitem__(0)

    def __setitem__(self, _index: Any, value: Any) -> None:
        super().__setitem__(0, value)


class _One(int):
    """The number of devices. `[None] * number` makes the lists that are indexed by device."""

    def __rmul__(self, other: Any) -> Any:
        return _AnyIndex(other) if isinstance(other, list) else other


class _DeviceOnCpu(type):
    """The type of a stand-in for the class `torch.device`: any GPU it is asked for is the CPU."""

    def __call__(cls, kind: Any, *index: Any) -> Any:
        import torch

        names_a_gpu = kind is None or isinstance(kind, int) or str(kind).partition(":")[0] == "cuda"
        return torch.device("cpu") if names_a_gpu else torch.device(kind, *index)

    def __instancecheck__(cls, instance: Any) -> bool:
        import torch

        return isinstance(instance, torch.device)


class _TorchOnCpu(types.ModuleType):
    """torch as Unsloth's modules see it: `device` is the stand-in, all else is torch."""

    device = _DeviceOnCpu("device", (), {})

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def torchvision_fault() -> str | None:
    """Why Unsloth would refuse the installed torchvision, and the fix; None without one, or where its operators load.
    It is asked in another process: here torch must not come before Unsloth."""
    if find_spec("torchvision") is None:
        return None
    code = "import torch, torchvision; torch.ops.torchvision.nms"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return None
    error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return (
        f"Unsloth refuses the installed torchvision, whose operators do not load ({error}): pip uninstall torchvision, "
        "or install the build for this torch from the index that torch came from"
    )


def import_unsloth(cache: Path) -> Any:
    """Import Unsloth and let it write its RLOO trainer into `cache`.

    Raises:
        RuntimeError: torch or a library that Unsloth patches is imported already.
    """
    early = [name for name in ("torch", "transformers", "trl", "peft") if name in sys.modules]
    if early:
        raise RuntimeError(f"{', '.join(early)} came first: run these tests in a process of their own")
    os.environ.update(SWITCHES, UNSLOTH_COMPILE_LOCATION=str(cache))
    import torch

    _describe_gpu(torch.cuda)
    _index_by_one_element()
    import unsloth

    torch.cuda.device_count = lambda: 1  # 0 during the import, where a GPU would be asked for its driver
    torch._C._cuda_getCurrentRawStream = lambda _index=0: 0
    keep_on_cpu()
    _write_trainer()
    return unsloth


def _describe_gpu(cuda: Any) -> None:
    answers = {
        "get_device_properties": GPU,
        "get_device_name": GPU.name,
        "get_device_capability": (GPU.major, GPU.minor),
        "mem_get_info": (GPU.total_memory, GPU.total_memory),
        "current_device": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "is_bf16_supported": True,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_args, _answer=answer, **_keywords: _answer)


def _index_by_one_element() -> None:
    """Let the interpreter of Triton before 3.9 make an index of an array of one element, which numpy refuses from 2.4
    on: `int(data)`, where 3.9 has `int(data.squeeze())`. It sets the tensors' methods again for every launch."""
    import triton
    from triton.runtime import interpreter

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9):
        return
    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def keep_on_cpu() -> None:
    """Point the device names and the per-device tables of Unsloth's modules at the CPU.

    To be called before every load: a load brings further modules in. It also sets `torch` in one of those that are
    there to that of transformers.trainer, and builds rotary tables after that: the stand-in is there too.
    """
    import torch
    import transformers.trainer

    stand_in = _TorchOnCpu("torch")
    transformers.trainer.torch = stand_in
    replaced = {"DEVICE_COUNT": _One(1), "DEVICE_TYPE_TORCH": "cpu", "get_current_device": lambda: None}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in ("unsloth", "unsloth_zoo"):
            continue
        for attribute, value in replaced.items():
            if hasattr(module, attribute):
                setattr(module, attribute, value)
        if name.startswith("unsloth.models.") and getattr(module, "torch", None) is torch:
            module.torch = stand_in


def _write_trainer() -> None:
    """What Unsloth does to TRL at import on a machine with a GPU, for RLOO alone (the others take long)."""
    from unsloth.models import rl

    def only_rloo() -> None:
        rl._patch_trl_rl_trainers("rloo_trainer")

    with mock.patch.dict(os.environ, UNSLOTH_ALLOW_CPU="0"), mock.patch.object(rl, "patch_trl_rl_trainers", only_rloo):
        rl.PatchFastRL()


def write_sft_trainer() -> None:
    """What Unsloth does to TRL's SFTTrainer there: its own version, whose constructor flattens batches by itself."""
    from unsloth import trainer
    from unsloth.models import rl

    with mock.patch.dict(os.environ, UNSLOTH_ALLOW_CPU="0"):
        rl._patch_trl_rl_trainers("sft_trainer")
    trainer._patch_trl_trainer()

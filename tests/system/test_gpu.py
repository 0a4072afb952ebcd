"""Which GPU is this process's, by the driver's word; only the driver is faked."""

import json
import sys
from pathlib import Path

import pytest

from rloo_kit.system import gpu

GIB = 2**30
T4 = {"name": "Tesla T4", "capability": [7, 5], "total": 16 * GIB, "used": 1 * GIB, "uuid": "GPU-aaaa-1111"}
A10 = {"name": "A10", "capability": [8, 6], "total": 24 * GIB, "used": 6 * GIB, "uuid": "GPU-bbbb-2222"}
A10["mig"] = {"MIG-slice": 5 * GIB}


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fake_driver")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "FAKE_GPUS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", json.dumps([T4, A10]))


@pytest.mark.parametrize(
    ("faked", "reason"),
    [
        (None, "no NVIDIA driver: NVML Shared Library Not Found"),  # the common laptop
        ("broken", "the NVIDIA driver does not answer: Unknown Error"),  # updated under a running kernel
        ("[]", "the NVIDIA driver lists no GPU"),  # a container with the driver's library
        ("no bindings", "NVML's Python bindings (nvidia-ml-py) are not installed"),
    ],
)
def test_no_gpu_has_a_reason(monkeypatch: pytest.MonkeyPatch, faked: str | None, reason: str) -> None:
    """NVML raises on start, and set-up must not; a missing package of 50 kB looked like a missing GPU."""
    if faked == "no bindings":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif faked:
        monkeypatch.setenv("FAKE_GPUS", faked)
    assert gpu.find_gpus() == gpu.Gpus(None, 0, reason)
    if faked != "[]":  # the driver can go away between two questions
        assert gpu.find_holders(gpu.Gpu(0, "A10", 24.0, 24.0, (8, 6), "580.00")) == []


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["A10"]), ("1,0", ["A10", "Tesla T4"]), (" 0 , 1", ["Tesla T4", "A10"]), ("GPU-bbbb", ["A10"])]
    + [("0,7,1", ["Tesla T4"])]  # CUDA stops at the first that it does not know
    + [(hidden, []) for hidden in ("", "-1", "NoDevFiles", "GPU-cccc", "MIG-other")],
)
def test_cuda_visible_devices_is_obeyed(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    """NVML ignores the variable: a run set to use the A10 was given fp16 because GPU 0 is a T4."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpu.find_gpus()
    assert (found.gpu.name if found.gpu else None) == (names[0] if names else None)
    assert found.count == len(names)
    if not names:
        assert found.reason == f"CUDA_VISIBLE_DEVICES={visible!r} hides the 2 NVIDIA GPU(s)"


@pytest.mark.usefixtures("gpus")
def test_a_mig_slice_has_its_own_memory_and_its_gpus_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 5 GiB on a GPU of 24: the whole GPU's memory would be a promise that is not kept."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-slice")
    found = gpu.find_gpus().gpu
    assert found is not None and (found.name, found.memory_gib, found.capability) == ("A10", 5.0, (8, 6))

"""Giving memory back; figures on a card are for tests/gpu."""

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest

from rloo_kit import kernel


class Model:
    """Refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_and_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imported torch to free memory would take some."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gc.disable()
    try:
        model = weakref.ref(Model())
        assert model() is not None
        kernel.release_memory()
        assert model() is None
    finally:
        gc.enable()
    assert "torch" not in sys.modules


def test_the_figures_on_a_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before and after in GiB, allocator's cache included; the device itself is faked here."""
    held = [3 * 2**30]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_reserved=lambda: held[0],
        empty_cache=lambda: held.__setitem__(0, 2**29),
        ipc_collect=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert kernel.release_memory() == kernel.Released(3.0, 0.5)
    assert capsys.readouterr().out == "GPU memory held by this process: 3.00 GiB before, 0.50 after\n"
    kernel.release_memory(verbose=False)
    assert capsys.readouterr().out == ""


def test_a_process_without_a_cuda_context_opens_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asking CUDA for its memory opens a context, which holds a few hundred MiB: worse than nothing."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))  # type: ignore[arg-type]
    released = kernel.release_memory()
    assert released is not None and released.device == "cpu"
    expected = f"memory held by this process: {released.before_gib:.2f} GiB before, {released.after_gib:.2f} after\n"
    assert capsys.readouterr().out == expected

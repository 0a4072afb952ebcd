"""What the harness finds out about torchvision, and what it changes in an older Triton's interpreter."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.with_unsloth import interpreter

FITS = "import torch; library = torch.library.Library('torchvision', 'DEF'); library.define('nms(Tensor x) -> Tensor')"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (FITS, None),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "operator torchvision::nms does not exist"),
        ("import torch  # its library is not found, and it imports all the same", "nms"),
    ],
)
def test_a_torchvision_is_in_the_way_only_if_its_operators_do_not_load(
    source: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All these tests were skipped wherever torchvision was installed, on every machine with Unsloth's own extra."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = interpreter.torchvision_fault()
    if fault is None:
        assert found is None
    else:
        assert found is not None and fault in found and "pip uninstall torchvision" in found
    assert "torchvision" not in sys.modules


def test_without_torchvision_nothing_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None)
    assert interpreter.torchvision_fault() is None


@pytest.mark.parametrize(("version", "replaced"), [("3.6.0", True), ("3.9.0", False), ("3.10.1", False)])
def test_an_array_of_one_element_is_an_index(
    version: str, replaced: bool, unsloth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 converts it by `int()`, which numpy refuses from 2.4 on: no kernel ran."""
    import numpy
    import triton
    from triton.runtime import interpreter as runtime

    class Tensor:
        handle = SimpleNamespace(data=numpy.array([3]))

    def as_in_3_6(tensor: Any, scope: Any) -> None:
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))
        scope.set_attr(tensor, "T", None)

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(runtime, "_patch_lang_tensor", as_in_3_6)
    interpreter._index_by_one_element()
    assert (runtime._patch_lang_tensor is not as_in_3_6) == replaced
    if replaced:
        runtime._patch_lang_tensor(Tensor, SimpleNamespace(set_attr=setattr))
        assert range(5)[Tensor()] == 3
        assert hasattr(Tensor, "T")

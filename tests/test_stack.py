"""The import order, in fresh processes. Unsloth is a small package here that imports TRL (tests/with_unsloth has the
real one), and the driver is faked; TRL and accelerate are real where the check leans on their insides."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

A10 = {"name": "A10", "capability": [8, 6], "total": 24 * 2**30, "used": 0, "uuid": "GPU-b"}
RunFresh = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def site(run_fresh: RunFresh, tmp_path: Path) -> Path:
    """The path's first folder, with a package `unsloth` that remembers what was loaded before it, and imports TRL."""
    package = tmp_path / "site" / "unsloth"
    package.mkdir()
    (package / "import_fixes.py").write_text("")
    code = "import sys\nLOADED = [n for n in ('torch', 'trl', 'transformers', 'peft') if n in sys.modules]\n"
    (package / "__init__.py").write_text(code + "from . import import_fixes\nimport trl\n")
    return tmp_path / "site"


@pytest.fixture
def with_unsloth(run_fresh: RunFresh, site: Path) -> RunFresh:
    """`run_fresh` on a machine with a GPU and Unsloth."""
    return lambda code, **variables: run_fresh(code, [A10], hide_unsloth=False, **variables)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The error that ended a process: its last line."""
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_set_up_imports_unsloth_there_and_then(with_unsloth: RunFresh) -> None:
    """With the import left for later, the `from trl import ...` of the next cell lost the order."""
    code = "e = rloo_kit.setup_environment()\n"
    code += "print(e.backend, 'unsloth' in sys.modules, 'torch' in sys.modules, e.backend_reason, sep='|')"
    assert printed(with_unsloth(code)) == "unsloth|True|False|an NVIDIA GPU and Unsloth are there"


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import peft\nrloo_kit.setup_environment()", "peft was"),
        # reached without set-up too: RLOOTrainer in a user's own script
        ("import transformers, rloo_kit._stack\nrloo_kit._stack.load_stack()", "transformers was"),
        # naming one at a time would take three restarts
        ("import transformers, trl\nrloo_kit.load_policy\nrloo_kit.setup_environment()", "trl and transformers were"),
        # that Unsloth is there by now proves nothing
        ("import trl, unsloth\nrloo_kit.setup_environment()", "trl was"),
    ],
)
def test_each_library_that_is_patched_is_named(with_unsloth: RunFresh, site: Path, code: str, named: str) -> None:
    """What was loaded before Unsloth stays unpatched, whichever library it is and whatever imports Unsloth: the run is
    slow, or wrong, for no visible cause."""
    for module in ("transformers", "peft", "trl"):
        (site / f"{module}.py").write_text("")
    error = refusal(with_unsloth(code))
    fixes = ("restart the kernel", "above all other imports", "RLOO_KIT_BACKEND=transformers")
    assert f"ImportOrderError: {named} imported before Unsloth." in error and all(fix in error for fix in fixes)


@pytest.mark.slow
def test_a_real_accelerator_that_came_first_is_an_error(with_unsloth: RunFresh) -> None:
    """It has settled device and precision by then. torch alone is harmless; accelerate's own state tells."""
    code = "import torch, accelerate, rloo_kit._stack\ndef forget():\n"
    code += "    for name in [n for n in sys.modules if n.split('.')[0] in ('transformers', 'trl', 'peft')]:\n"
    code += "        del sys.modules[name]\n"  # whether accelerate loads any of them is its own affair
    code += "forget()\nrloo_kit._stack._refuse_if_late()\naccelerate.Accelerator(cpu=True)\nforget()\nprint('so far')\n"
    done = with_unsloth(code + "rloo_kit.setup_environment()")
    error = refusal(done)
    assert done.stdout == "so far\n"
    assert "torch and an Accelerator (accelerate) were set up before Unsloth." in error
    assert "restart the kernel" in error


@pytest.mark.parametrize(
    ("first", "backend"), [("", "unsloth True"), ("'transformers'", "transformers False")], ids=["auto", "chosen"]
)
def test_a_second_call_changes_nothing(with_unsloth: RunFresh, site: Path, first: str, backend: str) -> None:
    """The set-up cell is run again all the time, when TRL is loaded; and load_stack() and the command line call it
    without an argument after a cell that chose transformers."""
    (site / "trl.py").write_text("")
    code = f"import warnings\nwarnings.simplefilter('error')\nfirst = rloo_kit.setup_environment({first})\nimport trl\n"
    code += "e = rloo_kit.setup_environment()\n"
    code += "print(first.to_dict() == e.to_dict(), e.backend, 'unsloth' in sys.modules)"
    assert printed(with_unsloth(code)) == f"True {backend}"


def test_a_loaded_trl_without_unsloth_earns_a_warning_once(run_fresh: RunFresh, tmp_path: Path) -> None:
    """There is no order to lose then; but the same notebook on a GPU would stop."""
    (tmp_path / "site" / "trl.py").write_text("")
    code = "import trl, warnings\nwith warnings.catch_warnings(record=True) as caught:\n"
    code += "    warnings.simplefilter('always')\n    [rloo_kit.setup_environment() for _ in range(2)]\n"
    code += "print(len(caught), caught[0].message, caught[0].filename)"
    found = printed(run_fresh(code, [A10]))
    assert found.startswith("1 trl was imported before rloo_kit.setup_environment(). Without Unsloth that is harmless")
    assert found.endswith("<string>")  # points at the user's line


@pytest.mark.parametrize(
    ("gpus", "variables", "first", "expected"),
    [
        # without an accelerator its import fails, and an environment shared with a GPU machine has to work all the same
        (None, {}, "", "transformers False no NVIDIA driver: NVML Shared Library Not Found fp32"),
        # the way out that every message names
        ([A10], {"RLOO_KIT_BACKEND": "transformers"}, "",
         "transformers False requested by RLOO_KIT_BACKEND=transformers bf16"),
        # a user's own import on top, and the harness that runs it without a GPU: in sys.modules Unsloth stands behind
        # the TRL that it imports itself
        (None, {}, "import unsloth\n", "unsloth True imported in this process already fp32"),
    ],
)  # fmt: skip
def test_which_backend_there_is(
    run_fresh: RunFresh, site: Path, gpus: Any, variables: dict[str, str], first: str, expected: str
) -> None:
    code = "e = rloo_kit.setup_environment()\nprint(e.backend, 'unsloth' in sys.modules, e.backend_reason, e.precision)"
    assert printed(run_fresh(first + code, gpus, hide_unsloth=False, **variables)) == expected


def test_an_import_of_unsloth_that_fails_says_what_to_do(with_unsloth: RunFresh, site: Path) -> None:
    """It raises on a torchvision whose operators do not load, a traceback of forty lines with no way out."""
    (site / "unsloth" / "__init__.py").write_text("raise NotImplementedError('torchvision::nms does not exist')")
    error = refusal(with_unsloth("rloo_kit.setup_environment()"))
    assert "SetupError: Unsloth is installed but its import failed: NotImplementedError: torchvision::nms" in error
    assert "rloo-kit doctor" in error and "RLOO_KIT_BACKEND=transformers" in error


def test_a_missing_library_is_named_with_the_command(run_fresh: RunFresh) -> None:
    """Somebody copied the folder and installed nothing."""
    error = refusal(run_fresh("from rloo_kit._stack import load_stack\nsys.modules['torch'] = None\nload_stack()"))
    assert error.endswith("SetupError: torch is not installed, and the kit needs it: pip install -e .")


def test_the_stack_is_the_real_libraries_in_the_right_order(with_unsloth: RunFresh, tmp_path: Path) -> None:
    """Without a call of set-up: Unsloth first, the rest after it, once, and nothing written into the working folder."""
    code = """
from rloo_kit._stack import load_stack
stack = load_stack()
assert stack.unsloth.LOADED == [] and load_stack() is stack
assert [m.__name__ for m in (stack.torch, stack.transformers, stack.trl, stack.peft, stack.datasets)] == [
    "torch", "transformers", "trl", "peft", "datasets"]
order = list(sys.modules)
first = [name for name in order if name in ("unsloth.import_fixes", "torch", "transformers", "trl", "peft")][0]
stack.trl.RLOOTrainer
print(first, rloo_kit.setup_environment().backend, os.environ["ACCELERATE_MIXED_PRECISION"], os.listdir("."))
"""
    assert printed(with_unsloth(code)).splitlines()[-1] == "unsloth.import_fixes unsloth bf16 ['configs']"


@pytest.mark.slow
def test_the_stack_leaves_what_a_run_may_not_need_and_announces_a_long_load(run_fresh: RunFresh) -> None:
    """peft (with bitsandbytes) and datasets (with pandas) took more time than torch, before a line was printed; then a
    command printed nothing for 20 s on a busy machine. stdout stays as it is: `--json` is read by programs."""
    code = "import time\nfrom rloo_kit import _stack\n_stack.QUIET_S = 0.0\nstack = _stack.load_stack()\n"
    code += "late = ('peft', 'datasets', 'bitsandbytes', 'pandas', 'trl.trainer.rloo_trainer')\n"
    code += "print([name for name in late if name in sys.modules])\n_stack.QUIET_S = 60.0\n"
    code += "print(stack.peft.__name__)\n_stack.QUIET_S = 0.0\nos.environ.update(RANK='1', WORLD_SIZE='2')\n"
    code += "print(stack.datasets.__name__)\nwith _stack._progress('of a second rank'):\n    time.sleep(0.2)"
    done = run_fresh(code)
    assert printed(done) == "[]\npeft\ndatasets"
    assert [line for line in done.stderr.splitlines() if "loading" in line] == ["loading torch and TRL ..."]

"""What set-up settles without a heavy library: precision, backend, caches, progress bars, the table."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.system.environment import choose_backend
from rloo_kit.system.gpu import Gpu
from rloo_kit.system.versions import is_importable

GIB = 2**30
SECRET = "hf_TopSecretValue123"
A10 = {"name": "A10", "capability": [8, 6], "total": 24 * GIB, "used": 6 * GIB, "uuid": "GPU-b"}
T4 = {"name": "Tesla T4", "capability": [7, 5], "total": 16 * GIB, "used": 0, "uuid": "GPU-a"}
Run = Callable[..., subprocess.CompletedProcess[str]]


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        ([A10], {}, "bf16 bf16 bfloat16"),
        ([T4], {}, "fp16 fp16 float16"),
        ([A10], {"CUDA_VISIBLE_DEVICES": ""}, "fp32 no float32"),
        ([T4, A10], {"CUDA_VISIBLE_DEVICES": "1"}, "bf16 bf16 bfloat16"),
        ([T4, A10], {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "bf16 bf16 bfloat16"),
        (None, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "fp32 no float32"),
    ],
)
def test_precision_follows_the_gpus_hardware(run_fresh: Run, gpus: list, variables: dict, expected: str) -> None:
    """torch.cuda.is_bf16_supported() counts emulation, so a T4 trained in bf16 at a tenth of its speed. accelerate
    reads its variable unchecked, and it beats bf16=False: a left-over made a CPU run fail."""
    code = "e = rloo_kit.setup_environment()\n"
    code += "print(e.precision, os.environ['ACCELERATE_MIXED_PRECISION'], e.dtype_name)"
    assert printed(run_fresh(code, gpus, **variables)) == expected


def test_a_precision_that_had_to_be_changed_is_noted(run_fresh: Run) -> None:
    """Overruling the user's own variable silently would be as confusing as obeying it."""
    done = run_fresh("print(rloo_kit.setup_environment().notes)", ACCELERATE_MIXED_PRECISION="bf16")
    assert "ACCELERATE_MIXED_PRECISION was 'bf16'; set to 'no' to agree with the precision" in printed(done)


def test_a_cpu_build_of_torch_leaves_the_gpu_alone(run_fresh: Run, tmp_path: Path) -> None:
    """A GPU, Unsloth and a CPU torch: Unsloth's import failed far away from the cause."""
    metadata = tmp_path / "site" / "torch-2.13.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("2.13.0", "2.13.0+cpu"))
    found = printed(run_fresh("print(rloo_kit.setup_environment())", [A10]))
    assert "A10 is there, but torch 2.13.0+cpu is a CPU build" in " ".join(found.split())
    assert "fp32" in found


@pytest.mark.parametrize(
    ("argument", "variable", "message"),
    [
        ("auto", "unslot", "'unslot' is not a backend: use auto, unsloth, transformers"),  # fell through to the default
        ("unslot", "", "'unslot' is not a backend: use auto, unsloth, transformers"),
        ("auto", "unsloth", r"Unsloth is not installed. pip install -e '.\[gpu\]'.*RLOO_KIT_BACKEND=transformers"),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, argument: str, variable: str, message: str
) -> None:
    """The message names the ways out."""
    monkeypatch.setitem(sys.modules, "unsloth", None)  # type: ignore[arg-type]
    monkeypatch.setenv("RLOO_KIT_BACKEND", variable)
    with pytest.raises((ConfigError, SetupError), match=message):
        choose_backend(argument, Gpu(0, "a GPU", 24.0, 20.0, (8, 0), "580.00"), "")


def test_the_argument_beats_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that names its backend must not be overruled by what a shell still holds."""
    monkeypatch.setenv("RLOO_KIT_BACKEND", "unsloth")
    assert choose_backend("transformers", None, "none") == ("transformers", "requested by backend=transformers")


def test_a_bare_folder_called_unsloth_is_not_unsloth(run_fresh: Run, tmp_path: Path) -> None:
    """A clone of Unsloth's repository in the working folder is found as a namespace package."""
    if is_importable("unsloth"):
        pytest.skip("the real one is installed here and would be found")
    (tmp_path / "work" / "unsloth").mkdir()
    code = "e = rloo_kit.setup_environment(); print(e.backend, e.backend_reason)"
    assert printed(run_fresh(code, [A10], hide_unsloth=False)) == "transformers Unsloth is not installed"


def test_unsloths_cache_leaves_the_working_folder(run_fresh: Run, tmp_path: Path) -> None:
    """It wrote unsloth_compiled_cache/ wherever a notebook happened to run; one folder a set of versions, too."""
    code = "e = rloo_kit.setup_environment()\nprint(os.environ['UNSLOTH_COMPILE_LOCATION'], e.unsloth_cache)"
    location, reported = printed(run_fresh(code)).split()
    assert location == reported
    assert Path(location).parent == tmp_path / "home/.cache/rloo-kit/unsloth_compiled_cache"
    assert location.endswith("-2.13.0")
    assert printed(run_fresh(code, UNSLOTH_COMPILE_LOCATION="/chosen")) == "/chosen /chosen"
    assert os.listdir(tmp_path / "work") == ["configs"]


def test_a_read_only_home_is_no_obstacle(run_fresh: Run, tmp_path: Path) -> None:
    """Batch machines have homes that cannot be written."""
    (tmp_path / "file").write_text("")  # a folder cannot be made below a file, for root neither
    code = "from rloo_kit.system.environment import cache_folder; print(cache_folder())"
    found = Path(printed(run_fresh(code, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))))
    assert found.is_dir() and found.parent == tmp_path


def test_a_cache_that_somebody_else_prepared_is_refused(run_fresh: Run, tmp_path: Path) -> None:
    """Unsloth's compiled code is imported from it, and the name of the folder in /tmp is known to everybody."""
    (tmp_path / "file").write_text("")
    code = "from rloo_kit.system.environment import cache_folder; print(cache_folder())"
    folder = tmp_path / f"rloo-kit-{os.getuid()}"
    for prepare in (lambda: folder.symlink_to(tmp_path / "home"), lambda: (folder.mkdir(), folder.chmod(0o777))):
        (tmp_path / "home").mkdir(exist_ok=True)
        prepare()
        done = run_fresh(code, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
        assert done.returncode != 0 and "RLOO_KIT_CACHE" in done.stderr and str(folder) in done.stderr
        folder.unlink() if folder.is_symlink() else folder.rmdir()
    printed(run_fresh(code, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path)))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_telemetry_is_off_unless_the_user_has_it_on(run_fresh: Run, tmp_path: Path) -> None:
    """TRL, Unsloth and vLLM each report their use; a user of this kit expects none of it."""
    names = ["HF_HUB_DISABLE_TELEMETRY", "UNSLOTH_DISABLE_STATISTICS", "VLLM_NO_USAGE_STATS"]
    code = f"e = rloo_kit.setup_environment()\nprint([os.environ.get(n) for n in {names}], e.telemetry)\n"
    found = printed(run_fresh(code))
    assert found.startswith("['1', '1', '1'] off (HF_HUB_DISABLE_TELEMETRY=0")
    code += "from huggingface_hub import constants; print('hub', constants.HF_HUB_DISABLE_TELEMETRY)"
    assert "hub True" in printed(run_fresh(code))
    assert "hub False" in printed(run_fresh("import huggingface_hub.constants\n" + code))
    assert "on: huggingface_hub was imported before" in printed(run_fresh("import huggingface_hub.constants\n" + code))
    (tmp_path / "work" / ".env").write_text("HF_HUB_DISABLE_TELEMETRY=0\n")
    assert printed(run_fresh(code)).splitlines()[0].startswith("['0', None, None] as the libraries have it")


def test_the_table_says_all_and_no_secret(run_fresh: Run, tmp_path: Path) -> None:
    """What is pasted into an issue: everything needed to help, and no value of a key."""
    (tmp_path / "work" / ".env").write_text(f"HF_TOKEN={SECRET}\nWANDB_API_KEY=\n")
    code = "e = rloo_kit.setup_environment(keys=['HF_TOKEN', 'MY_KEY'])\nprint(e, repr(e), e.to_dict())\n"
    code += f"assert os.environ['HF_TOKEN'] == {SECRET!r}"
    done = run_fresh(code, [A10])
    found = printed(done)
    for part in ("transformers: Unsloth is not installed", "A10, compute capability 8.6", "18.0 of 24.0 GiB free"):
        assert part in found
    for part in ("bf16", "trl 1.", "HF_TOKEN found in .env", "MY_KEY missing", "WANDB_API_KEY empty", "text ("):
        assert part in found
    assert SECRET not in found + done.stderr


def test_tqdm_notebook_true_in_env_file_leaves_tqdm_alone(run_fresh: Run, tmp_path: Path) -> None:
    """Set-up writes `false` unless `.env` says otherwise."""
    (tmp_path / "work" / ".env").write_text("TQDM_NOTEBOOK=True\n")
    code = "print(rloo_kit.setup_environment().progress, 'tqdm.autonotebook' in sys.modules)"
    assert printed(run_fresh(code)) == "left to tqdm (TQDM_NOTEBOOK=true) False"

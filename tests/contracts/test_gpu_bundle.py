"""The bundle for a GPU machine without a network: what goes into it, and that the kit works after `source use.sh`."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rloo_kit
from rloo_kit.demo.embedded import RECIPES, RECORD

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_bundle.py"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MODEL = f"thinking-compact-0-r{RECIPES['thinking']}"  # its folder in the cache
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROOTS = [*map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"], "pytest"])]
ALL = "\n".join(found.name for found in ROOTS)  # a machine that has these needs no download


@pytest.fixture
def revision() -> str:
    """The commit of this checkout; the bundle is made from one."""
    if not shutil.which("bash"):
        pytest.skip("bash is not here")
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return done.stdout.strip()


def build(dest: Path, have: str, python: str = PYTHON, cache: Path | None = None) -> str:
    """Run the script with that list of packages. `cache`: the kit's, with the model. Returns what it printed."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    packages = dest.with_name("have.txt")
    packages.write_text(have, encoding="utf-8")
    command = [sys.executable, SCRIPT, "--dest", dest, "--have", packages, "--python", python]
    command += ["--no-model"] * (cache is None)
    env = os.environ | {"RLOO_KIT_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=dest.parent, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source(folder: Path, dest: Path, commands: str = "true") -> subprocess.CompletedProcess[str]:
    """`source use.sh` in a new shell in `folder` with nothing but PATH, and then the commands."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {"PATH": path, "BUNDLE_ROOT": str(folder / "unpacked")}
    script = f"set -eu; source {dest}/use.sh; {commands}"
    return subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_use_sh_finds_or_unpacks_the_kit(revision: str, tmp_path: Path) -> None:
    """On such a machine results had no revision, there were no rewards and no rloo-kit, and models were built again."""
    dest, model = tmp_path / "made" / "bundle", tmp_path / "cache" / MODEL
    model.mkdir(parents=True)
    (model / RECORD).write_text("{}", encoding="utf-8")
    assert build(dest, ALL, cache=model.parent).startswith("0 packages")
    show = "command -v rloo-kit; rloo-kit --version; echo $RLOO_KIT_REVISION; pwd; echo $PYTHONPATH"
    show += f"; test -f $RLOO_KIT_CACHE/{MODEL}/{RECORD}"
    show += "; test -L rloo_kit/rewards; ls rloo_kit/rewards"
    done = source(tmp_path, dest, f"source {dest}/use.sh; {show}")
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, command, version, shown, kit, path, *rewards = done.stdout.splitlines()
    assert command == f"{tmp_path}/unpacked/bin/rloo-kit" and version == f"rloo-kit {rloo_kit.__version__}"
    assert shown == revision and revision in first and "length.py" in rewards
    assert Path(kit).parent == tmp_path / "unpacked" and path.startswith(f"{kit}:{tmp_path}/unpacked/site-")

    checkout = tmp_path / "checkout"
    (checkout / "rloo_kit").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    done = source(checkout, dest, "pwd; echo $RLOO_KIT_REVISION")
    assert done.stdout.splitlines()[1] == str(checkout), done.stderr
    assert done.stdout.splitlines()[2] == (dest / "REVISION").read_text().strip()


def test_another_python_is_named(revision: str, tmp_path: Path) -> None:
    """Wheels for another Python fail at the first compiled module, deep in pandas."""
    build(tmp_path / "bundle", ALL, "3.9")
    done = source(tmp_path, tmp_path / "bundle", "echo went on")
    assert done.returncode != 0 and "went on" not in done.stdout
    assert f"python3 is {PYTHON}: make gpu-bundle BUNDLE_PYTHON={PYTHON}" in done.stderr


@pytest.mark.slow
def test_the_packages_come_from_the_bundle(revision: str, tmp_path: Path) -> None:
    """The real thing, with few packages: pip's download, the machine's older versions, imports in an empty shell."""
    probe = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path / "probe", "python-dotenv"]
    if subprocess.run(probe, capture_output=True, timeout=120).returncode:
        pytest.skip("no package index answers")
    missing = {"ruamel-yaml", "python-dotenv", "trl"}
    versions = {canonicalize_name(found.metadata["Name"]): found.version for found in metadata.distributions()}
    have = [f"{name}=={version}" for name, version in versions.items() if name not in missing]
    dest = tmp_path / "made" / "bundle"
    assert build(dest, "\n".join([*have, "unsloth", "unsloth_zoo", "annotated-doc==0.0.1"])).startswith("3 packages: ")
    modules = "import json, dotenv, ruamel.yaml, trl, rloo_kit, rloo_kit.rewards as rewards"
    files = "[module.__file__ for module in (dotenv, ruamel.yaml, trl, rloo_kit, rewards)]"
    done = source(tmp_path, dest, f"source {dest}/use.sh; python -c '{modules}; print(json.dumps({files}))'")
    assert done.returncode == 0, done.stdout + done.stderr
    unpacked = tmp_path / "unpacked"
    places = [
        Path(file).relative_to(unpacked).parts[0].partition("-")[0] for file in json.loads(done.stdout.split("\n")[2])
    ]
    assert places == ["site"] * 3 + ["kit"] * 2

"""`make canary`: the kit's fingerprints and a short set of tests with the newest TRL, transformers, PEFT and Unsloth.

Core tests run with the newest of all. The Unsloth tests run with the newest that Unsloth's own requirements allow, as a
user gets them. Run it with the Python of a separate environment: it installs into that environment and changes no file
of git's.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNSLOTH = ("unsloth", "unsloth-zoo")
NEWEST = ("trl", "transformers", "peft", *UNSLOTH)
# What the newest of these ask for in their turn: pip picks a version that fits.
FOLLOW = ("accelerate", "tokenizers", "huggingface-hub", "hf-xet", "safetensors", "certifi")
RUNS = {  # one process each: Unsloth patches TRL when it is imported
    "core": (
        "tests/contracts/test_upstream.py",
        "tests/contracts/test_patched_attributes.py",
        "tests/loop/test_equality_with_stock.py",
    ),
    "Unsloth": ("tests/with_unsloth/test_fingerprints.py", "tests/with_unsloth/test_padding.py"),
}
LIMIT_S = 1200


def normalise(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    """The normalised name at the start of a requirement; empty for a comment or a blank line."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return normalise(match.group()) if match else ""


def free(requirements: Iterable[str]) -> list[str]:
    """The requirements, those of NEWEST and FOLLOW by their bare names.

    >>> free(["torch>=2.11,<2.14", "trl>=1.15,<1.16"])
    ['torch>=2.11,<2.14', 'trl']
    """
    names = ((requirement, requirement_name(requirement)) for requirement in requirements)
    return [name if name in NEWEST + FOLLOW else requirement for requirement, name in names]


def kept(constraints: Iterable[str]) -> list[str]:
    """The lines of a constraints file that pin neither NEWEST nor FOLLOW."""
    return [line for line in constraints if requirement_name(line) not in ("", *NEWEST, *FOLLOW)]


def caps(requirements: Iterable[str]) -> list[str]:
    """Of Unsloth's requirements those of the other libraries in NEWEST and FOLLOW.

    >>> caps(["unsloth_zoo>=2", "torch<2.15", "trl!=0.19.0,<=1.15.0", "peft>=0.18; extra == 'x'"])
    ['trl!=0.19.0,<=1.15.0']
    """
    moved = {*NEWEST, *FOLLOW} - {*UNSLOTH}
    return [one for one in requirements if requirement_name(one) in moved and "extra ==" not in one]


def pip_install(folder: Path, *arguments: str) -> None:
    """Install into this Python; what neither NEWEST nor FOLLOW names stays as pinned."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    constraints = folder / "constraints-canary.txt"
    constraints.write_text("\n".join(kept((ROOT / "constraints.txt").read_text().splitlines())) + "\n")
    subprocess.run([*pip, "-c", str(constraints), *arguments], check=True)


def install(folder: Path) -> None:
    """Install the kit, its other dependencies as pinned, and the newest of NEWEST."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed += (ROOT / "tests/with_unsloth/requirements.txt").read_text().splitlines()
    wanted = [line for line in free(needed) if requirement_name(line)]
    pip_install(folder, "--upgrade", "--upgrade-strategy", "only-if-needed", *wanted, "packaging")
    # Without their requirements, as in make test-unsloth: no torchvision and xformers for a CPU build of torch.
    pip_install(folder, "--upgrade", "--no-deps", *UNSLOTH)
    pip_install(folder, "--no-deps", "-e", str(ROOT))


def run(files: Iterable[str]) -> tuple[list[str], bool]:
    """Run test files in one process.

    Returns:
        pytest's last line and one for each test that broke, with its reason; whether some passed and none broke.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no", "-rfE"]
    try:
        done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"no result within {LIMIT_S} s"], False
    lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
    broken = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [lines[-1], *broken], done.returncode == 0 and " passed" in lines[-1]


def describe_versions(tested: dict[str, str], installed: dict[str, str | None]) -> list[str]:
    """One line a library: the version installed, the tested range, whether it is new."""
    from rloo_kit.system.versions import in_range

    lines = []
    for name in NEWEST:
        version = installed.get(name)
        verdict = "missing" if version is None else "tested" if in_range(version, tested[name]) else "NEW"
        lines.append(f"{name:<14}{version or '-':<14}tested {tested[name]:<18}{verdict}")
    return lines


def main() -> int:
    folder = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        print("tests/canary.py installs packages: run it with the Python of a separate environment (make canary)")
        return 2
    install(folder)
    sys.path.insert(0, str(ROOT))
    from rloo_kit.system.versions import TESTED, TESTED_EXTRAS, installed_version

    print("canary: newest versions; for Unsloth the newest that it allows")
    good, new = True, False
    for name, files in RUNS.items():
        if name == "Unsloth":
            asked = [one for library in UNSLOTH for one in importlib.metadata.requires(library) or ()]
            pip_install(folder, *caps(asked))
        versions = describe_versions(TESTED | TESTED_EXTRAS, {name: installed_version(name) for name in NEWEST})
        new |= any(line.endswith("NEW") for line in versions)
        lines, passed = run(files)
        good &= passed
        print(f"{name}:", *versions, *lines, sep="\n  ")
    if not good:
        print("A test broke, or a set ran none. make setup and make test-unsloth keep to the tested versions.")
    elif new:
        print("Nothing broke in these tests with versions outside the tested ranges; make test-all checks more.")
    else:
        print("The package index offers nothing newer than the tested ranges: this run says nothing about drift.")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

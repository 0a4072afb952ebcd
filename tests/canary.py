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
from xml.etree import ElementTree

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


def run(name: str, files: Iterable[str], folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Run test files in one process.

    Returns:
        How many tests passed, failed and were skipped, and the failures: test id and a reason of one line.
    """
    xml = folder / f"canary-{name}.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={xml}"]
    try:
        done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {}, [(name, f"no result within {LIMIT_S} s")]
    if not xml.exists():
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {}, [(name, lines[-1] if lines else f"pytest ended with exit code {done.returncode}")]
    counts, broken = read_results(xml.read_text())
    if done.returncode != 0 and not broken:
        broken = [(name, f"pytest ended with exit code {done.returncode}")]
    return counts, broken


def read_results(xml: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Counts and failures from pytest's JUnit file."""
    counts, broken = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        problem = next((part for tag in ("failure", "error") if (part := case.find(tag)) is not None), None)
        if problem is not None:
            counts["failed"] += 1
            lines = (problem.get("message") or problem.text or "").strip().splitlines()
            test = f"{case.get('classname', '')}::{case.get('name', '')}".lstrip(":")
            broken.append((test, lines[0][:200] if lines else "no message"))
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, broken


def describe_versions(tested: dict[str, str], installed: dict[str, str | None]) -> list[str]:
    """One line a library: the version installed, the tested range, whether it is new."""
    from rloo_kit.system.versions import in_range

    lines = []
    for name in NEWEST:
        version = installed.get(name)
        verdict = "missing" if version is None else "tested" if in_range(version, tested[name]) else "NEW"
        lines.append(f"  {name:<14}{version or '-':<14}tested {tested[name]:<18}{verdict}")
    return lines


def summarise(results: dict[str, tuple[list[str], dict[str, int], list[tuple[str, str]]]]) -> tuple[str, int]:
    """The report and the exit code: 1 when a test broke, or when a run passed none. A set's result: its versions, what
    `run` returned."""
    lines, failed = ["canary: newest versions; for Unsloth the newest that it allows"], False
    for name, (versions, counts, broken) in results.items():
        said = ", ".join(f"{count} {what}" for what, count in counts.items()) or "no tests ran"
        lines += [f"{name}: {said}", *versions]
        lines += [f"  BROKE {test}: {reason}" for test, reason in broken]
        failed |= bool(broken) or not counts.get("passed")
    if failed:
        lines.append("A test broke, or a set ran none. make setup and make test-unsloth keep to the tested versions.")
    elif any(line.endswith("NEW") for line in lines):
        lines.append("Nothing broke in these tests with versions outside the tested ranges; make test-all checks more.")
    else:
        lines.append(
            "The package index offers nothing newer than the tested ranges: this run says nothing about drift."
        )
    return "\n".join(lines), int(failed)


def main() -> int:
    folder = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        print("tests/canary.py installs packages: run it with the Python of a separate environment (make canary)")
        return 2
    install(folder)
    sys.path.insert(0, str(ROOT))
    from rloo_kit.system.versions import TESTED, TESTED_EXTRAS, installed_version

    results = {}
    for name, files in RUNS.items():
        if name == "Unsloth":
            asked = [one for library in UNSLOTH for one in importlib.metadata.requires(library) or ()]
            pip_install(folder, *caps(asked))
        versions = describe_versions(TESTED | TESTED_EXTRAS, {name: installed_version(name) for name in NEWEST})
        results[name] = (versions, *run(name, files, folder))
    report, code = summarise(results)
    print(report)
    return code


if __name__ == "__main__":
    sys.exit(main())

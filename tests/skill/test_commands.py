"""Every shell line of the skill is one that runs: syntax, subcommands, options, overrides, files.

What is checked is looked up in the real thing: `bash -n`, the help of `rloo-kit`, of papermill and of each script, the
configuration, the notebooks' cells. No command is run to its end here; test_workflow.py does that.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.skill.pages import ROOT, find_shell, read_pages, split_commands

BIN = Path(sys.executable).parent
BATCH_KEYS = ("parameters.", "grid.", "jobs=", "name=", "output_dir=")


@functools.cache
def ask_help(*command: str) -> str:
    """What `command --help` prints, on one line; empty if it fails."""
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    return re.sub(r"\s+", " ", done.stdout) if done.returncode == 0 else ""


def find_options(words: list[str], described: str) -> list[str]:
    """Options among the words that a help text does not have."""
    options = [word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)]
    return [f"no option {one}" for one in options if not re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", described)]


def check_kit(command: str, *rest: str) -> list[str]:
    """Faults of `rloo-kit COMMAND ...`: its options, and its overrides by the configuration that they change."""
    from rloo_kit import RlooKitError, load_config

    described = ask_help(str(BIN / "rloo-kit"), command)
    if not described:
        return [f"rloo-kit has no command {command}"]
    faults, overrides = find_options(list(rest), described), [word for word in rest if "=" in word and command != "ask"]
    if command == "batch":
        return faults + [f"no key {word} in a batch" for word in overrides if not word.startswith(BATCH_KEYS)]
    own = ROOT / rest[0].removeprefix("$RLOO/") if rest else ROOT
    try:
        load_config(own if own.is_file() else ROOT / "configs" / "arithmetic_thinking.yaml", *overrides)
    except RlooKitError as error:
        faults.append(str(error))
    return faults


def check_python(first: str, *rest: str) -> list[str]:
    """Faults of `python SCRIPT ...` and of the extras that `python -m pip` is asked for."""
    if first == "-m":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = {extra for word in rest for names in re.findall(r"\[(.+)\]$", word) for extra in names.split(",")}
        return [f"no extra {name}" for name in sorted(extras - set(project["optional-dependencies"]))]
    if not first.startswith("$RLOO/"):
        return []
    return find_options(list(rest), ask_help(sys.executable, str(ROOT / first.removeprefix("$RLOO/"))))


def check_papermill(notebook: str, *rest: str) -> list[str]:
    """Its options, and the names of the notebook's parameters."""
    cells = json.loads((ROOT / notebook.removeprefix("$RLOO/")).read_text(encoding="utf-8"))["cells"]
    known = "\n".join("".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", []))
    given = [rest[index + 1] for index, word in enumerate(rest) if word == "-p"]
    faults = [f"{notebook} has no parameter {name}" for name in given if not re.search(rf"(?m)^{name} =", known)]
    return find_options(list(rest), ask_help(str(BIN / "papermill"))) + faults


CHECKS = {"rloo-kit": check_kit, "python": check_python, "python3": check_python, "papermill": check_papermill}


def find_faults(page: str, text: str) -> list[str]:
    """What is wrong with the commands of a page, each with its place."""
    faults = []
    for block in find_shell(page, text):
        done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=30)
        if done.stderr:
            faults.append(f"{block.place}: {done.stderr.strip()}")
            continue
        for words in split_commands(block.code):
            missing = [word for word in words if re.match(r"\$RLOO/\w", word)]
            found = [f"{word} is not there" for word in missing if not (ROOT / word[6:]).exists()]
            check = CHECKS.get(Path(words[0]).name)
            if check and not found and len(words) > 1:
                found = check(*words[1:])
            faults += [f"{block.place}: {fault}" for fault in found]
    return faults


@pytest.mark.parametrize(("page", "text"), read_pages(), ids=[name for name, _ in read_pages()])
def test_every_command_of_the_page_runs(page: str, text: str) -> None:
    """An agent copies a line with an option that was renamed, and repairs the wrong thing."""
    assert find_faults(page, text) == []


def test_training_in_the_background_gives_the_shell_back(tmp_path: Path) -> None:
    """`mkdir ... && nohup ... &` kept the caller's pipes open: an agent's shell waited for the whole run."""
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    code = next(block.code for block in find_shell("SKILL.md", text) if "nohup" in block.code)
    program = tmp_path / "rloo-kit"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{code}\necho pid $!"],
        capture_output=True,
        text=True,
        timeout=10,
        cwd=tmp_path,
        env=environment,
    )
    os.kill(int(done.stdout.split("pid ")[1]), 15)
    assert done.returncode == 0 and (tmp_path / "outputs" / "my_run.log").is_file()

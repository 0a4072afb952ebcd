"""Every shell line of the skill is one that runs: syntax, subcommands, options, overrides, files, extras.

`bash -n` and the command line's own parser decide. No command is run to its end here; test_workflow.py does that.
"""

import os
import re
import shutil
import subprocess
import tomllib
from functools import partial
from pathlib import Path

import pytest

from evals.run import find_command_faults
from tests.skill.pages import ROOT, find_blocks, find_shell, read_pages, split_commands

DOCS = [(f"docs/{path.name}", path.read_text(encoding="utf-8")) for path in sorted((ROOT / "docs").glob("*.md"))]
PAGES = dict([*DOCS, ("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))]) | dict(read_pages())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def find_faults(words: list[str]) -> list[str]:
    """What is wrong with a command."""
    faults = [f"no {word}" for word in words if re.match(r"\$RLOO/\w", word) and not (ROOT / word[6:]).exists()]
    asked = {extra for word in words for names in re.findall(r"\[([\w,]+)\]$", word) for extra in names.split(",")}
    faults += [f"no extra {extra}" for extra in sorted(asked - set(EXTRAS)) if "pip" in words]
    if words[0] == "rloo-kit" and len(words) > 2:
        faults += find_command_faults([word.removeprefix("$RLOO/") for word in words[1:]])
    return faults


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_runs(page: str) -> None:
    """An agent copies a line with an option that was renamed, and repairs the wrong thing."""
    blocks = find_shell if page in dict(read_pages()) else partial(find_blocks, language="bash")
    for block in blocks(page, PAGES[page]):
        done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=30)
        assert not done.stderr, f"{block.place}: {done.stderr}"
        assert not [fault for words in split_commands(block.code) for fault in find_faults(words)], block.place


def test_a_page_that_was_copied_alone_says_so(tmp_path: Path) -> None:
    """Four installers in a row copied SKILL.md without the rest. The set-up prints the path and runs nothing."""
    skill = tmp_path / ".claude" / "skills" / "rloo"
    skill.mkdir(parents=True)
    text = Path(shutil.copy(ROOT / "SKILL.md", skill)).read_text(encoding="utf-8")
    code = next(block.code for block in find_shell("SKILL.md", text) if "check_setup.py" in block.code)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}  # no agent has set a folder
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.stdout, done.stderr) == (f"{skill}\n", "") and 'git clone ADDRESS "$RLOO"' in text


def test_training_in_the_background_gives_the_shell_back(tmp_path: Path) -> None:
    """`mkdir ... && nohup ... &` kept the caller's pipes open: an agent's shell waited for the whole run."""
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    code = next(block.code for block in find_shell("SKILL.md", text) if "nohup" in block.code)
    program = tmp_path / "rloo-kit"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", f"{code}\necho pid $!"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=tmp_path, env=environment)
    os.kill(int(done.stdout.split("pid ")[1]), 15)
    assert done.returncode == 0 and (tmp_path / "outputs" / "my_run.log").is_file()

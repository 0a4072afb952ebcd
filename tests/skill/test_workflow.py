"""The commands of SKILL.md, run to their end in a project folder as an agent runs them; only sizes are changed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.skill.pages import ROOT, copy_skill, find_blocks

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
SMALLER = {"rloo.max_steps=120": "rloo.max_steps=8", "-p max_steps 20": "-p max_steps 2 -p eval_prompts 50"}
PAGES = (ROOT / "SKILL.md", ROOT / "references" / "python-and-batches.md")
BLOCKS = [block.code for page in PAGES for block in find_blocks(page.name, page.read_text(encoding="utf-8"), "bash")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with the skill in .claude/skills/rloo."""
    folder = tmp_path_factory.mktemp("project")
    copy_skill(folder / ".claude" / "skills" / "rloo")
    rows = [{"prompt": f"{n % 83}+{n % 97}=", "answer": str(n % 83 + n % 97)} for n in range(300)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def run(project: Path) -> Iterator[Callable[..., str]]:
    """`run(word)`: the one block of the pages that holds the word, in a shell of its own; what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    groups = []

    def run_block(word: str, before: str = "export RLOO=$PWD/.claude/skills/rloo\n") -> str:
        (code,) = (code for code in BLOCKS if word in code)
        for old, new in SMALLER.items():
            code = code.replace(old, new)
        log = project / "shell.log"
        with open(log, "w+", encoding="utf-8") as out:
            process = subprocess.Popen(
                ["bash", "-e", "-c", before + code], stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=project,
                env=environment, start_new_session=True,
            )  # fmt: skip
            groups.append(process.pid)
            ended = process.wait(timeout=TIMEOUT_S)
        assert ended == 0, log.read_text(encoding="utf-8")[-3000:]
        return log.read_text(encoding="utf-8")

    yield run_block
    for group in groups:  # what was started in the background and is still there
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_the_workflow_as_it_is_written(project: Path, run: Callable[..., str]) -> None:
    """Lines that are right one by one fail in a row: the next one looks for a folder that none of them made."""
    skill, folder = project / ".claude" / "skills" / "rloo", project / "outputs" / "my_run"
    first = run("check_setup.py", before="unset RLOO\n")
    assert first.splitlines()[0] == str(skill) and '"ok": true' in first
    run("doctor --json")
    run("rloo-kit init")
    assert (project / "configs" / "test_my_run_rewards.py").is_file(), "SKILL.md names the reward's test"
    config = project / "configs" / "my_run.yaml"
    text = config.read_text()
    assert "max_steps: 60" in text
    config.write_text(text.replace("max_steps: 60", "max_steps: 6"))
    assert run("rloo-kit preflight").splitlines()[-1] == "GO"
    trial = run("run.name=trial")
    assert '"level"' in trial and '"closed_share"' in trial
    run("nohup")
    ends = time.monotonic() + TIMEOUT_S
    while not (folder / "report.html").is_file() and time.monotonic() < ends:
        time.sleep(0.5)
    assert (folder / "report.html").is_file(), (project / "outputs" / "my_run.log").read_text()
    read = run("rloo-kit report")
    assert re.search("^(learnt|no evidence|no signal|broken|gamed): ", read, re.M), read
    assert (project / "outputs" / "comparison.html").is_file(), read
    assert run("rloo-kit eval").count("accuracy, greedy") == 2
    assert '"answer"' in run("rloo-kit ask")
    assert (folder / "export" / "adapter" / "certificate.json").is_file()
    assert "step 8/8" in run("rloo.max_steps=120")
    assert not (skill / "outputs").exists(), "written into the skill's folder"


def test_the_notebook_as_it_is_written(project: Path, run: Callable[..., str]) -> None:
    """Outside a project folder a notebook's outputs once went into the folder of the skill."""
    run("papermill")
    assert (project / "outputs" / "arithmetic_thinking.ipynb").is_file()
    status = json.loads((project / "outputs" / "arithmetic_thinking" / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 2

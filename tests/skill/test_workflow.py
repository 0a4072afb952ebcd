"""The commands of SKILL.md, run to their end in a project folder with the skill next to it, as an agent runs them.

Only sizes are changed: six training steps instead of sixty, fifty held-out prompts instead of a thousand.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.skill.pages import ROOT, find_blocks
from tests.skill.test_format import list_tracked

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
SMALLER = {
    r"rloo\.max_steps=120": "rloo.max_steps=8",
    r"-p max_steps 20": "-p max_steps 2 -p eval_prompts 50",
}
SMALL_RUN = {"max_steps: 60": "max_steps: 6"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with the skill in .claude/skills/rloo."""
    folder = tmp_path_factory.mktemp("project")
    skill = folder / ".claude" / "skills" / "rloo"
    for name in list_tracked():
        if (ROOT / name).is_file():
            (skill / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, skill / name)
    return folder


@pytest.fixture(scope="module")
def shell(project: Path) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """`shell(code)`: the code in a separate shell in the project, with the two lines that SKILL.md puts first."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RLOO": str(project / ".claude" / "skills" / "rloo"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    groups = []

    def run(code: str) -> subprocess.CompletedProcess[str]:
        for pattern, small in SMALLER.items():
            code = re.sub(pattern, small, code)
        log = project / "shell.log"
        with open(log, "w+", encoding="utf-8") as out:
            process = subprocess.Popen(
                ["bash", "-e", "-c", code], stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=project,
                env=environment, start_new_session=True,
            )  # fmt: skip
            groups.append(process.pid)
            code_of_end = process.wait(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(code, code_of_end, log.read_text(encoding="utf-8"), "")

    yield run
    for group in groups:  # what was started in the background and is still there
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture(scope="module")
def blocks() -> dict[str, str]:
    """The shell blocks of SKILL.md and of the page on notebooks by a word that each of them alone holds."""
    pages = ("SKILL.md", "references/python-and-batches.md")
    found = [one.code for page in pages for one in find_blocks(page, (ROOT / page).read_text(encoding="utf-8"), "bash")]
    words = ("check_setup.py", "doctor --json", "rloo-kit init", "rloo-kit preflight", "run.name=trial", "nohup")
    words = (*words, "rloo-kit report", "rloo-kit eval", "rloo-kit ask", "rloo.max_steps=120", "papermill")
    named = {word: [code for code in found if word in code] for word in words}
    assert all(len(codes) == 1 for codes in named.values()), {word: len(codes) for word, codes in named.items()}
    return {word: codes[0] for word, codes in named.items()}


def read_json(text: str) -> dict:
    """The first JSON object in what was printed."""
    return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]


def wait_until_finished(folder: Path) -> str:
    """The state that status.json ends with."""
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        if (folder / "status.json").is_file():
            state = json.loads((folder / "status.json").read_text())["state"]
            if state != "running" and (folder / "report.html").is_file():
                return state
        time.sleep(0.5)
    raise AssertionError(f"{folder} did not end within {TIMEOUT_S} s")


def test_the_workflow_as_it_is_written(project: Path, shell: Callable, blocks: dict[str, str]) -> None:
    """Lines that are right one by one fail in a row: the next one looks for a folder that none of them made."""
    first = shell(f"unset RLOO; {blocks['check_setup.py']}")
    assert first.returncode == 0, first.stdout
    assert first.stdout.splitlines()[0] == str(project / ".claude" / "skills" / "rloo")
    assert read_json(first.stdout)["ok"]
    assert shell(blocks["doctor --json"]).returncode == 0

    rows = [{"prompt": f"{n % 83}+{n % 97}=", "answer": str(n % 83 + n % 97)} for n in range(300)]
    (project / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    written = shell(blocks["rloo-kit init"])
    assert written.returncode == 0, written.stdout
    assert (project / "configs" / "test_my_run_rewards.py").is_file(), "SKILL.md names the reward's test"
    config = project / "configs" / "my_run.yaml"
    text = config.read_text()
    for old, new in SMALL_RUN.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    config.write_text(text)

    checked = shell(blocks["rloo-kit preflight"])
    assert checked.returncode == 0 and checked.stdout.splitlines()[-1] == "GO", checked.stdout[-3000:]

    trial = shell(blocks["run.name=trial"].replace("configs/my_run.yaml", "configs/my_run.yaml run.report=false"))
    assert trial.returncode == 0, trial.stdout[-3000:]
    assert '"level"' in trial.stdout and '"closed_share"' in trial.stdout

    assert shell(blocks["nohup"]).returncode == 0
    assert wait_until_finished(project / "outputs" / "my_run") == "finished", (
        project / "outputs/my_run.log"
    ).read_text()
    read = shell(blocks["rloo-kit report"])
    assert read.returncode == 0 and re.search("^(learnt|no evidence|no signal|broken|gamed): ", read.stdout, re.M)
    assert (project / "outputs" / "comparison.html").is_file(), read.stdout

    measured = shell(blocks["rloo-kit eval"])
    assert measured.returncode == 0 and measured.stdout.count("accuracy, greedy") == 2, measured.stdout[-3000:]
    used = shell(blocks["rloo-kit ask"])
    assert used.returncode == 0 and '"answer"' in used.stdout, used.stdout[-3000:]
    assert (project / "outputs" / "my_run" / "export" / "adapter" / "certificate.json").is_file(), used.stdout[-3000:]
    longer = shell(blocks["rloo.max_steps=120"].splitlines()[-1])
    assert longer.returncode == 0 and "step 8/8" in longer.stdout, longer.stdout[-3000:]
    assert not (project / ".claude" / "skills" / "rloo" / "outputs").exists(), "written into the skill's folder"


def test_the_notebook_as_it_is_written(project: Path, shell: Callable, blocks: dict[str, str]) -> None:
    """Outside a project folder a notebook's outputs once went into the folder of the skill."""
    done = shell(blocks["papermill"])
    assert done.returncode == 0, done.stdout[-3000:]
    assert (project / "outputs" / "arithmetic_thinking.ipynb").is_file()
    status = json.loads((project / "outputs" / "arithmetic_thinking" / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 2

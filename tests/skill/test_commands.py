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
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.skill.pages import ROOT, Block, Command, find_shell, read_pages, split_commands

BIN = Path(sys.executable).parent
READERS_OWN = ("configs/my_run.yaml", "outputs/", "FILE", "FOLDER")  # made by the reader, or stands for one
# Programs whose words are the system's; anything else in a command has a check of its own or is refused.
PLAIN = {"grep", "break", "cd", "pwd", "echo", "test", "mkdir", "cp", "tail"}
BATCH_KEYS = ("parameters.", "grid.", "jobs=", "name=", "output_dir=")


@functools.cache
def ask_help(*command: str) -> str:
    """What `command --help` prints, on one line; empty if it fails."""
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=ROOT
    )
    return re.sub(r"\s+", " ", done.stdout) if done.returncode == 0 else ""


def find_options(words: tuple[str, ...], described: str) -> list[str]:
    """Options among the words that a help text does not have."""
    return [f"no option {word}" for word in words if is_option(word) and not has_option(described, word)]


def is_option(word: str) -> bool:
    return re.fullmatch(r"--?[a-z][\w-]*", word) is not None


def has_option(described: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", described) is not None


def find_missing_file(word: str) -> list[str]:
    """A path of the skill that is not there; a path of the reader's own is fine if it is one of those we make."""
    if word.startswith("$RLOO/"):
        return [] if (ROOT / word.removeprefix("$RLOO/")).exists() else [f"{word} is not there"]
    looks_like_path = "/" in word or word.endswith((".yaml", ".ipynb", ".py"))
    if looks_like_path and "=" not in word and not word.startswith(READERS_OWN):
        return [f"{word} is neither the skill's ($RLOO/...) nor one that the reader makes"]
    return []


def check_kit(words: tuple[str, ...]) -> list[str]:
    """Faults of `rloo-kit SUBCOMMAND ...`."""
    command, rest = words[1], words[2:]
    described = ask_help(str(BIN / "rloo-kit"), command)
    if not described:
        return [f"rloo-kit has no command {command}"]
    overrides = [word for word in rest if "=" in word]
    faults = find_options(rest, described)
    if command == "batch":
        return faults + [f"no key {word} in a batch" for word in overrides if not word.startswith(BATCH_KEYS)]
    return faults + find_unknown_keys(rest[0] if rest else "", overrides)


def find_unknown_keys(file: str, overrides: list[str]) -> list[str]:
    """What the configuration says of the overrides: of the skill's file, or of the one that the reader copied."""
    from rloo_kit import RlooKitError, load_config

    own = ROOT / file.removeprefix("$RLOO/")
    try:
        load_config(own if own.is_file() else ROOT / "configs" / "arithmetic_thinking.yaml", *overrides)
    except RlooKitError as error:
        return [str(error)]
    return []


def check_python(words: tuple[str, ...]) -> list[str]:
    """Faults of `python SCRIPT ...` and `python -m MODULE ...`."""
    if words[1] == "-m":
        return check_pip(words[3:]) if words[2] == "pip" else [] if words[2] == "venv" else [f"unknown {words[2]}"]
    script = words[1].removeprefix("$RLOO/")
    if not words[1].startswith("$RLOO/") or not (ROOT / script).is_file():
        return []  # a missing file is told by find_missing_file
    described = ask_help(sys.executable, str(ROOT / script))
    return find_options(words[2:], described) if described else [f"{script} --help fails"]


def check_pip(words: tuple[str, ...]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra for word in words for names in re.findall(r"\[(.+)\]$", word) for extra in names.split(",")}
    unknown = extras - set(project["optional-dependencies"])
    return [f"no extra {name}" for name in sorted(unknown)] + find_options(words, "install -c -e")


def check_papermill(words: tuple[str, ...]) -> list[str]:
    faults = find_options(words[1:], ask_help(str(BIN / "papermill")))
    notebook = ROOT / words[1].removeprefix("$RLOO/")
    if notebook.is_file():
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        known = "\n".join("".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", []))
        given = [words[index + 1] for index, word in enumerate(words) if word == "-p"]
        faults += [f"{words[1]} has no parameter {name}" for name in given if not re.search(rf"(?m)^{name} =", known)]
    return faults


def check_npx(words: tuple[str, ...]) -> list[str]:
    """An installation that asks nothing: without -y it installs nothing, without -a it installs for every agent."""
    known = words[1].partition("@")[0] == "skills" and (words[2:] == () or words[2] == "add")
    ready = len(words) <= 3 or {"-y", "-a"} <= set(words)  # a bare `npx skills add` is a name, not a command to run
    return [] if known and ready else [f"unknown {' '.join(words)}"]


CHECKS: dict[str, Callable[[tuple[str, ...]], list[str]]] = {
    "rloo-kit": check_kit,
    "python": check_python,
    "python3": check_python,
    "papermill": check_papermill,
    "npx": check_npx,
}


def find_faults(command: Command) -> list[str]:
    """What is wrong with one command."""
    program = Path(command.words[0]).name
    files = [fault for word in command.words[1:] for fault in find_missing_file(word)]
    if program in PLAIN:
        return files if program == "cp" else []
    if program not in CHECKS:
        return [f"unknown program {program}"]
    if "venv" in command.words or "pip" in command.words:
        files = []  # the environment is the reader's own
    return files + CHECKS[program](command.words)


def check_syntax(block: Block) -> str:
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=30, check=False)
    return done.stderr


def find_faults_of_page(page: str, text: str) -> list[str]:
    faults = []
    for block in find_shell(page, text):
        if told := check_syntax(block):
            faults.append(f"{block.place}: {told.strip()}")
        else:
            faults += [f"{one.place}: {fault}" for one in split_commands(block) for fault in find_faults(one)]
    return faults


@pytest.mark.parametrize(("page", "text"), read_pages(), ids=[name for name, _ in read_pages()])
def test_every_command_of_the_page_runs(page: str, text: str) -> None:
    """An agent copies a line with an option that was renamed, and repairs the wrong thing."""
    assert find_faults_of_page(page, text) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("for x in a; do", "syntax error"),
        ("rloo-kit trane configs/my_run.yaml", "no command trane"),
        ("rloo-kit train configs/my_run.yaml --overwritten", "no option --overwritten"),
        ("rloo-kit train configs/my_run.yaml rloo.max_stepz=5", "did you mean"),
        ("rloo-kit train configs/my_run.yaml rloo.max_steps=some", "max_steps"),
        ("rloo-kit train configs/other.yaml", "neither the skill's"),
        ('rloo-kit train "$RLOO/configs/none.yaml"', "is not there"),
        ('rloo-kit batch "$RLOO/configs/batch_arithmetic.yaml" --job 2', "no option --job"),
        ("rloo-kit batch FILE rloo.beta=0.0", "no key rloo.beta"),
        ('python "$RLOO/scripts/summarize_run.py" outputs/my_run --lasst 3', "no option --lasst"),
        ('python "$RLOO/scripts/none.py"', "is not there"),
        ('python -m pip install -e "$RLOO[cuda]"', "no extra cuda"),
        ('papermill "$RLOO/notebooks/arithmetic_thinking.ipynb" outputs/x.ipynb -p steps 20', "no parameter steps"),
        ("npx skills add ADDRESS", "unknown npx"),
        ("curl -O https://x.y/z", "unknown program curl"),
        ("mkdir -p outputs && rloo-kit evaluate configs/my_run.yaml > log 2>&1 &", "no command evaluate"),
    ],
)
def test_a_bad_line_is_found(line: str, fault: str) -> None:
    """Each kind of fault once; a check that finds none of them would pass on any page."""
    found = find_faults_of_page("page.md", f"Text.\n\n1. Do:\n\n   ```bash\n   {line}\n   ```\n")
    assert len(found) == 1 and found[0].startswith("page.md:6: ") and fault in found[0], found
    if not line.startswith(("for", "curl", "mkdir")):
        found = find_faults_of_page("page.md", f"Say `{line}` here.\n")
        assert len(found) == 1 and fault in found[0], found


def test_the_pages_hold_the_whole_workflow() -> None:
    """A reader of the page that finds no lines, or half of them, would find no faults either."""
    commands = [
        one.words for page, text in read_pages() for block in find_shell(page, text) for one in split_commands(block)
    ]
    used = {words[1] for words in commands if words[0] == "rloo-kit"}
    assert used == {"doctor", "config", "plan", "train", "eval", "report", "batch"}
    assert {"--resume", "--overwrite", "--jobs", "--adapter", "--json"} <= {
        word for words in commands for word in words
    }
    scripts = {Path(words[1]).name for words in commands if words[0].startswith("python")}
    assert scripts >= {"check_setup.py", "summarize_run.py", "inspect_completions.py", "compare_runs.py"}
    assert any(words[0] == "papermill" for words in commands)


def test_every_command_of_the_kit_is_in_the_skill() -> None:
    """A command that was added later and is not in the skill is not used."""
    listed = ask_help(str(BIN / "rloo-kit")).partition("Commands")[2]
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    names = re.findall(r"│ ([a-z][\w-]+) {2,}|│ ([a-z]+) [A-Z]", listed)
    found = {first or second for first, second in names}
    assert {"doctor", "train", "batch"} <= found, listed
    assert not {name for name in found if f"rloo-kit {name}" not in text}


@pytest.mark.parametrize("name", ["arithmetic_thinking", "qwen3_4b_thinking_8gb"])
def test_the_table_of_configs_names_them_all(name: str) -> None:
    """A config that is not in the table is not chosen; one that is gone is."""
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8").partition("| file in")[2].partition("\n\n")[0]
    written = set()
    for cell in re.findall(r"^ *\| (`.+?) \|", text, flags=re.M):
        names = re.findall(r"`([\w.]+)`", cell)
        full = [one for one in names if one.endswith(".yaml")]
        written |= {Path(one).stem for one in full}
        written |= {re.sub(r"_\d+gb$", short, Path(full[-1]).stem) for short in names if short.startswith("_")}
    runs = {path.stem for path in (ROOT / "configs").glob("*.yaml") if "model:" in path.read_text(encoding="utf-8")}
    assert name in written and written == runs

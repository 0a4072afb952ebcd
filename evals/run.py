#!/usr/bin/env python3
"""Check what evals.json says without a model: its cases are complete, and what they expect exists and works.

    python evals/run.py              everything; trains two small runs, two minutes
    python evals/run.py --fast       without running the commands in `checks`: seconds
    python evals/run.py --queries    the prompts as trigger queries: [{"query", "should_trigger"}]

In the sentences of a case, each `rloo-kit ...` has to parse, each `section.key=value` to load and each path to exist in
the skill's folder. `checks` are commands, run in one new folder per case with the case's files: `exit` (0 unless
given), `writes` (files that are there afterwards), `prints` (a regular expression). How an agent answers needs an
agent: give the prompts to one, with the skill and without it, and grade `assertions`.

Exit codes: 0 everything holds; 1 something does not (listed); 2 a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKILL = Path(os.path.abspath(__file__)).parents[1]
EXAMPLES = ("configs/qwen3_4b_thinking_12gb.yaml", "configs/arithmetic_thinking.yaml")
PATH = re.compile(r"(?:SKILL\.md|(?:configs|docs|notebooks|references|rewards|scripts)/[\w./-]+\.\w+)")
TIMEOUT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="run no commands")
    parser.add_argument("--queries", action="store_true", help="print the trigger queries and end")
    options = parser.parse_args()
    cases = read_cases()
    if options.queries:
        print(json.dumps([{"query": case["prompt"], "should_trigger": triggers(case)} for case in cases], indent=2))
        return 0
    failed = 0
    for case in cases:
        faults = find_faults(case) or ([] if options.fast else run_checks(case))
        failed += len(faults)
        print(f"{case.get('id')}: {'; '.join(faults) or 'ok'}", flush=True)
    return 1 if failed else 0


def read_cases() -> list[dict]:
    return json.loads((SKILL / "evals" / "evals.json").read_text(encoding="utf-8"))["evals"]


def triggers(case: dict) -> bool:
    return case.get("should_trigger", True)


def find_faults(case: dict) -> list[str]:
    """What is missing in a case or wrong in its sentences."""
    faults = [f"no {name}" for name in ("prompt", "expected_output", "assertions") if not case.get(name)]
    faults += [f"no file {name}" for name in case.get("files", []) if not (SKILL / name).is_file()]
    for code in re.findall(r"`([^`]+)`", "\n".join([case.get("expected_output", ""), *case.get("assertions", [])])):
        words = shlex.split(code.replace("$RLOO/", ""))
        if words[0] == "rloo-kit" and len(words) > 1:
            faults += find_command_faults(words[1:])
        elif re.fullmatch(r"[a-z]+(\.\w+)+=.+", code):
            faults += find_key_faults([code])
        elif PATH.fullmatch(words[0]) and not is_own(words[0]) and not (SKILL / words[0]).exists():
            faults.append(f"no file {words[0]}")
    return faults


def is_own(path: str) -> bool:
    """Whether it is a file of the user's project."""
    return "/my_" in path or path.startswith("outputs/")


def find_command_faults(words: list[str]) -> list[str]:
    """What the command line refuses in `rloo-kit WORDS`: the command, an option, an override, a config that is not
    there. Nothing is run."""
    import typer

    from rloo_kit.cli import app

    group = typer.main.get_command(app)
    if words[0] not in group.commands:
        return [f"rloo-kit has no command {words[0]}"]
    try:
        given = group.commands[words[0]].make_context(words[0], words[1:]).params
    except Exception as error:  # of the parser that typer brings, a package of its own in some versions
        return [f"rloo-kit {words[0]}: {error}"]
    file = str(given.get("file") or "").removeprefix("$RLOO/")
    if file.startswith("configs/") and not is_own(file) and not (SKILL / file).is_file():
        return [f"no file {file}"]
    return find_key_faults(list(given.get("overrides") or ()), file) if words[0] != "batch" else []


def find_key_faults(overrides: list[str], file: str = "") -> list[str]:
    """What the configuration refuses; overrides of the reader's own file have to fit one of the examples."""
    from rloo_kit import RlooKitError, load_config

    faults = []
    for name in [file] if (SKILL / file).is_file() else EXAMPLES:
        try:
            load_config(SKILL / name, *overrides)
            return []
        except RlooKitError as error:
            faults.append(str(error))
    return faults[:1]


def run_checks(case: dict) -> list[str]:
    """Faults of the case's commands, run in order in a new folder that has its files."""
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {"RLOO": str(SKILL), "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for name in case.get("files", []):
            shutil.copy(SKILL / name, folder)
        for check in case.get("checks", []):
            done = subprocess.run(
                ["bash", "-c", check["run"]], cwd=folder, env=environment, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
            )  # fmt: skip
            found = [f"exit code {done.returncode}"] if done.returncode != check.get("exit", 0) else []
            found += [f"no {name}" for name in check.get("writes", []) if not (Path(folder) / name).exists()]
            if not re.search(check.get("prints", ""), done.stdout):
                found.append(f"does not print {check['prints']}")
            if found:
                faults.append(f"{check['run']}: {', '.join(found)}: {done.stdout[-500:]}")
    return faults


if __name__ == "__main__":
    sys.exit(main())

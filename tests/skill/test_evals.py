"""The cases of evals/evals.json, as far as they can be checked without a model."""

import json
import subprocess
import sys

import pytest

from evals.run import find_faults, read_cases, triggers
from tests.skill.pages import ROOT

CASES = read_cases()


def test_the_cases_follow_the_convention_and_name_what_exists() -> None:
    """A case that expects an option or a page which was renamed fails every agent, whatever it does."""
    found = json.loads((ROOT / "evals" / "evals.json").read_text(encoding="utf-8"))
    assert set(found) == {"skill_name", "evals"} and found["skill_name"] == "rloo"
    assert [case["id"] for case in CASES] == list(range(1, len(CASES) + 1)) and len(CASES) >= 12
    known = {"id", "prompt", "expected_output", "files", "assertions", "should_trigger", "checks"}
    assert all(set(case) <= known for case in CASES)
    assert sum(not triggers(case) for case in CASES) >= 3
    assert {case["id"]: find_faults(case) for case in CASES} == {case["id"]: [] for case in CASES}
    assert all(case.get("checks") for case in CASES if triggers(case))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`rloo-kit trian configs/my_run.yaml`", "rloo-kit has no command trian"),
        ("`rloo-kit plan configs/my_run.yaml --gpu 12`", "--gpu"),
        ("`rloo-kit train configs/my_run.yaml rloo.betta=0.1`", "rloo.betta"),
        ("`rloo-kit train configs/gone.yaml`", "no file configs/gone.yaml"),
        ("`rloo.kl_form=nothing`", "kl_form"),
        ("`references/gone.md`", "no file references/gone.md"),
    ],
)
def test_what_does_not_exist_is_found(text: str, fault: str) -> None:
    faults = find_faults({"prompt": "p", "expected_output": text, "assertions": ["a"]})
    assert len(faults) == 1 and fault in faults[0]


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_of_the_cases_do_what_they_expect() -> None:
    done = subprocess.run([sys.executable, ROOT / "evals" / "run.py"], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr

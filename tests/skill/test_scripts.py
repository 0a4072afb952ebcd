"""The scripts of the skill: run as an agent runs them, on a real run's folder and on folders for each exit code."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rloo_kit import load_config
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.runs.run_dir import RunDir
from tests.skill.pages import ROOT

TO_READ = {"minimal_rloo.py"}  # no tool of an agent: contracts/test_minimal_rloo.py
FILES = {path.name for path in (ROOT / "scripts").glob("*.py") if not path.name.startswith("_")}
SCRIPTS = sorted(FILES - TO_READ)
PLAIN_PYTHON = [sys.executable, "-S"]  # without site-packages: the standard library only
TINY = """
run: {{output_dir: {output}, progress_every_s: 0, sample_every_steps: 0, report: false}}
model: {{name: {model}, lora: {{r: 2, alpha: 2, target_modules: [q_proj]}}, max_seq_length: 128}}
data: {{source: {data}, test_size: 4, max_prompt_length: 64}}
rewards: [{{name: length_reward}}]
rloo: {{max_steps: 2, per_device_train_batch_size: 4, num_generations: 2, max_completion_length: 4, beta: 0.0}}
eval: {{num_completions: 1}}
"""
HEALTHY = {
    "completions/clipped_ratio": 0.1, "frac_score_zero_std": 0.4, "reward_std": 0.4, "entropy": 0.2, "grad_norm": 0.3,
    "clip_ratio/region_mean": 0.0, "rewards/failed_ratio": 0.0, "reward": 0.5,
}  # fmt: skip


def call(script: str, *words: Any, python: list[str] | None = None) -> tuple[int, Any, str]:
    """Exit code, the JSON on stdout (None where there is none), stderr."""
    command = [*(python or [sys.executable]), ROOT / "scripts" / script, *words]
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder that `rloo-kit train` leaves: two steps of a random model, evaluated before and after."""
    folder = tmp_path_factory.mktemp("real")
    rows = [{"prompt": f"add {number}", "answer": str(number)} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "tiny.yaml"
    file.write_text(TINY.format(output=folder / "outputs", model=tiny_folder, data=folder / "prompts.jsonl"))
    command = [Path(sys.executable).parent / "rloo-kit", "train", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / "tiny"


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(rows, state="finished", overrides=())`: a folder as RunDir leaves it, with those rows of metrics."""

    def build(rows: list[dict[str, Any]], state: str = "finished", overrides: tuple[str, ...] = ()) -> Path:
        words = (f"run.output_dir={tmp_path}", "run.name=made", *overrides)
        with RunDir.create(load_config(ROOT / "configs" / "arithmetic_thinking.yaml", *words)) as run_dir:
            run_dir.append_jsonl("metrics.jsonl", [row | {"run": run_dir.id} for row in rows])
            error = {"error": "RewardError: it failed"} if state == "failed" else {}
            run_dir.set_status(state, step=len(rows), max_steps=60, **error)
        return run_dir.folder

    return build


def call_here(script: str, *words: Any) -> tuple[int, Any]:
    """Exit code and JSON of a script in this process: the same `main`, without half a second of imports each time."""
    printed = io.StringIO()
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]), contextlib.redirect_stdout(printed):
        main = runpy.run_path(str(ROOT / "scripts" / script))["main"]
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    return code, json.loads(printed.getvalue())


def make_rows(count: int = 12, **changes: Any) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **changes} for step in range(1, count + 1)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_exit_codes_and_needs_no_package(script: str) -> None:
    """An agent asks for --help first, also where nothing is installed yet; a code that is not listed says nothing."""
    command = [*PLAIN_PYTHON, ROOT / "scripts" / script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\s+", " ", done.stdout)
    listed = re.findall(r"(?:Exit codes: |; )(\d) ", text)
    source = (ROOT / "scripts" / script).read_text() + (ROOT / "scripts" / "_common.py").read_text()
    assert listed[:1] == ["0"] and "2" in listed and len(set(listed)) == len(listed), text
    if script != "check_setup.py":
        assert {"3", "4", "5"} <= set(listed) and "NOTHING_YET, NOT_INSTALLED = 3, 4, 5" in source


@pytest.mark.parametrize("script", ["summarize_run.py", "inspect_completions.py", "compare_runs.py"])
def test_without_the_kit_or_a_run_the_error_is_json(script: str, tmp_path: Path) -> None:
    """A traceback where JSON is awaited stops an agent that could have installed the package."""
    folders = [tmp_path] * (2 if script == "compare_runs.py" else 1)
    code, printed, _ = call(script, *folders, python=PLAIN_PYTHON)
    assert code == 5 and "has no rloo-kit" in printed["error"] and "check_setup.py" in printed["error"]
    code, printed, _ = call(script, *folders)
    assert code == 3 and f"{tmp_path} holds no run" in printed["error"] and "outputs/" in printed["error"]


# ------------------------------------------------------------------------------------------------ check_setup.py


def test_check_setup_is_content_here() -> None:
    """Run in the repository with its environment it has nothing to say but what to do next."""
    code, found, errors = call("check_setup.py")
    assert code == 0, (found, errors)
    assert found["ok"] and found["skill"] == {"folder": str(ROOT), "missing": []}
    assert found["todo"] == [f"run {found['command']} doctor"] and "error" not in found
    assert found["versions"]["skill"] == found["versions"]["rloo_kit"]


def test_check_setup_tells_a_part_of_the_skill(tmp_path: Path) -> None:
    """Some installers copied SKILL.md alone; what follows then fails one by one."""
    shutil.copy(ROOT / "SKILL.md", tmp_path)
    code, found, _ = call("check_setup.py", "--skill", tmp_path)
    assert code == 3 and "pyproject.toml" in found["skill"]["missing"] and "SKILL.md" not in found["skill"]["missing"]
    assert "npx skills@1.5.18 add ADDRESS -a claude-code -y" in found["error"] and found["error"] == found["todo"][0]


def bare_environment(tmp_path: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH holds these shell scripts and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def check_elsewhere(tmp_path: Path, environment: dict[str, str]) -> tuple[int, Any]:
    """check_setup.py on a copy of the skill, by a link to this Python that has no rloo-kit beside it."""
    skill, python = tmp_path / "skill", tmp_path / "only-python" / "python3"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    skill.mkdir()
    for name in ("SKILL.md", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, skill)
    for name in ("configs", "docs", "notebooks", "references", "rewards", "rloo_kit", "scripts"):
        shutil.copytree(ROOT / name, skill / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [python, skill / "scripts" / "check_setup.py", "--project", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_check_setup_tells_how_to_install(tmp_path: Path) -> None:
    """Exit code 5 with the command to copy: this Python, the skill's constraints, the skill's folder."""
    code, found = check_elsewhere(tmp_path, bare_environment(tmp_path))
    assert code == 5 and found["command"] is None and found["skill"]["missing"] == []
    told = found["todo"][0]
    assert f"-m venv .venv-rloo && .venv-rloo/bin/python -m pip install -c {tmp_path}/skill/constraints.txt" in told
    assert f"-e '{tmp_path}/skill[notebook]'" in told and "[notebook,gpu]" in told


def test_check_setup_tells_another_version(tmp_path: Path) -> None:
    """After an update of the skill the old package stays installed, and its commands are other ones."""
    code, found = check_elsewhere(tmp_path, bare_environment(tmp_path, **{"rloo-kit": "echo rloo-kit 0.0.1"}))
    assert code == 6 and "the installed rloo-kit is 0.0.1 and this skill is" in found["error"]


def test_check_setup_tells_a_command_that_does_not_run(tmp_path: Path) -> None:
    """An environment whose Python is gone leaves a rloo-kit that starts nothing."""
    code, found = check_elsewhere(tmp_path, bare_environment(tmp_path, **{"rloo-kit": "exit 127"}))
    assert code == 5 and found["command"].endswith("/bin/rloo-kit") and "install rloo-kit" in found["error"]


def test_check_setup_tells_an_old_python(tmp_path: Path) -> None:
    """`python3` of an older system starts the script, and pip then fails with a page of text."""
    environment = bare_environment(tmp_path, python3="exit 1")
    code = "import sys; sys.version_info = (3, 9); sys.argv = ['check_setup.py']; sys.path.insert(0, sys.executable)\n"
    code += "import runpy; runpy.run_path(PATH, run_name='__main__')"
    skill = tmp_path / "skill"
    code = code.replace("PATH", repr(str(skill / "scripts" / "check_setup.py")))
    check_elsewhere(tmp_path, environment)
    command = [tmp_path / "only-python" / "python3", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=tmp_path
    )
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["python"] is None and "install Python 3.11 or 3.12" in found["error"]


# ---------------------------------------------------------------------------------------------- summarize_run.py


@pytest.mark.slow
def test_a_real_run_is_summarized(real_run: Path) -> None:
    """What the command line leaves is what the script reads."""
    code, found, errors = call("summarize_run.py", real_run)
    assert code in (0, 1), errors
    assert (found["state"], found["step"], found["max_steps"]) == ("finished", 2, 2)
    assert found["accuracy"]["before"]["prompts"] == 4
    assert found["accuracy"]["difference"]["low"] <= found["accuracy"]["difference"]["value"]
    judged = {one["metric"]: one["level"] for one in found["metrics"]}
    assert judged["completions/clipped_ratio"] == "alarming" and found["verdict"] == "alarming" and code == 1
    assert found["actions"] and "rloo.max_completion_length" in " ".join(found["actions"])
    assert {"reward", "val/ratio", "completions/mean_length"} <= set(found["means"])


def test_a_healthy_run_is_exit_code_0(make_run: Callable[..., Path]) -> None:
    """A verdict that is always alarming is soon not read."""
    code, found = call_here("summarize_run.py", make_run(make_rows()))
    assert code == 0 and found["verdict"] == "healthy" and found["actions"] == found["health"] == []


@pytest.mark.parametrize(
    ("changes", "code", "verdict", "key"),
    [
        ({"completions/clipped_ratio": 0.5}, 0, "watch", "rloo.max_completion_length"),
        ({"completions/clipped_ratio": 0.9}, 1, "alarming", "rloo.max_completion_length"),
        ({"frac_score_zero_std": 0.9}, 1, "alarming", "rloo.num_generations"),
        ({"entropy": 0.001}, 1, "alarming", "rloo.learning_rate"),
        ({"entropy": 0.9}, 0, "watch", "rloo.learning_rate"),
        ({"kl": 3.0}, 1, "alarming", "rloo.beta"),
        ({"grad_norm": 20.0}, 1, "alarming", "rloo.learning_rate"),
        ({"clip_ratio/region_mean": 0.01}, 1, "alarming", "exactly 1"),
        ({"rewards/failed_ratio": 0.2}, 0, "watch", "fix the reward"),
        ({"frac_score_zero_std": 1.0, "reward_std": 0.0, "reward": -1.0}, 1, "alarming", "every advantage is zero"),
        ({"grad_norm": 0.0}, 1, "alarming", "the gradient was zero in"),
    ],
)
def test_each_sign_is_judged_with_its_key(
    changes: dict[str, float], code: int, verdict: str, key: str, make_run: Callable[..., Path]
) -> None:
    """A verdict without the key to change leaves an agent guessing among sixty."""
    got, found = call_here("summarize_run.py", make_run(make_rows(**changes)))
    assert (got, found["verdict"]) == (code, verdict), found
    assert key in found["actions"][0]


def test_what_was_wrong_only_at_the_start_is_forgotten(make_run: Callable[..., Path]) -> None:
    """A run that found its signal after ten tied steps is fine now."""
    rows = make_rows(10, frac_score_zero_std=1.0, reward_std=0.0)
    rows += [{"step": step, **HEALTHY} for step in range(11, 25)]
    found = call_here("summarize_run.py", make_run(rows))[1]
    assert found["verdict"] == "healthy" and [(one["rule"], one["holds"]) for one in found["health"]] == [
        ("no_signal", False)
    ]
    code, found = call_here("summarize_run.py", make_run(rows[:10], "finished", ("run.name=again",)))
    assert code == 1 and [(one["rule"], one["since"], one["holds"]) for one in found["health"]] == [
        ("no_signal", 1, True)
    ]


def test_off_policy_a_clipped_ratio_is_no_bug(make_run: Callable[..., Path]) -> None:
    """With num_iterations above 1 the ratio is meant to be clipped."""
    rows = make_rows(**{"clip_ratio/region_mean": 0.05})
    code, found = call_here("summarize_run.py", make_run(rows, "finished", ("rloo.num_iterations=2",)))
    assert code == 0 and found["verdict"] == "healthy"


def test_a_failed_run_and_one_without_metrics(make_run: Callable[..., Path]) -> None:
    """Both have no verdict; an agent that polls has to tell them apart."""
    code, found = call_here("summarize_run.py", make_run([], "running"))
    assert code == 4 and "ask again" in found["error"]
    folder = make_run(make_rows(), "failed", ("run.name=second",))
    code, found = call_here("summarize_run.py", folder)
    assert code == 6 and found["state"] == "failed" and found["error"] == "RewardError: it failed"
    (folder / "metrics.jsonl").unlink()
    assert call_here("summarize_run.py", folder)[0] == 6


def test_a_configuration_that_cannot_be_read_is_told(make_run: Callable[..., Path]) -> None:
    """A run of an older version may hold keys that are gone."""
    folder = make_run(make_rows())
    (folder / "config.yaml").write_text("rloo: {bta: 1}\n")
    code, found = call_here("summarize_run.py", folder)
    assert code == 3 and "bta" in found["error"]


# ---------------------------------------------------------------------------------------- inspect_completions.py


@pytest.mark.slow
def test_a_real_rollout_is_shown(real_run: Path) -> None:
    """The last step's rollout, its shares, and as many completions as were asked for."""
    code, found, errors = call("inspect_completions.py", real_run, "--num", "3", "--order", "best")
    assert code == 0, errors
    assert found["step"] == 2 and found["num_completions"] == 4 and len(found["completions"]) == 3
    rewards = [one["reward"] for one in found["completions"]]
    assert rewards == sorted(rewards, reverse=True)
    assert found["truncated_share"] > 0 and found["mean_tokens"] <= 4
    code, found, _ = call("inspect_completions.py", real_run, "--step", "9")
    assert code == 4 and "no rollout has step 9; those that are kept go from 1 to 2" in found["error"]


def make_row(completion: str, ids: list[int], **changes: Any) -> dict[str, Any]:
    closed = 260 in ids
    row = {
        "step": 1, "prompt": "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "completion": completion, "completion_ids": ids, "prompt_tokens": 9, "completion_tokens": len(ids),
        "thinking_tokens": ids.index(260) if closed else None, "closed": closed, "truncated": not closed,
        "kl": 0.0, "rewards": {"answer_reward": 1.0}, "reward": 1.0, "advantage": 0.0, "columns": {"answer": "2"},
    }  # fmt: skip
    return row | changes


def test_thinking_and_answer_are_parted_by_ids(make_run: Callable[..., Path]) -> None:
    """A text that spells the closing tag in ordinary tokens has not closed its thinking, and cannot be cut at it."""
    folder = make_run(make_rows(1))
    rows = [
        make_row("one</think>2", [64, 260, 17, 258]),
        make_row("never closes", [64, 65, 66]),
        make_row("says </think> but goes on", [64, 65, 66, 67]),
        make_row("says </think> first</think>2", [64, 65, 260, 17]),
        make_row("two</think>and</think>2", [64, 260, 65, 260, 17], forced=True),
        make_row("just 2", [64, 17, 258], prompt="1+1=", truncated=False),
    ]
    RunDir(folder).append_jsonl("rollouts.jsonl", rows)
    code, found = call_here("inspect_completions.py", folder, "--num", "9")
    shown = [(one["thinking"], one["answer"], one.get("text")) for one in found["completions"]]
    assert code == 0 and found["think_end_id"] == 260
    assert shown == [
        ("one", "2", None),
        ("never closes", None, None),
        (None, None, "says </think> but goes on"),
        (None, None, "says </think> first</think>2"),
        ("two</think>and", "2", None),
        (None, "just 2", None),
    ]
    assert found["closed_share"] == 0.5 and found["truncated_share"] == pytest.approx(1 / 3)
    assert found["forced_share"] == pytest.approx(1 / 6), "a run of before there were budgets has no such entry"
    assert [one["forced"] for one in found["completions"]] == [False] * 4 + [True, False]


def test_long_texts_lose_their_middle(make_run: Callable[..., Path]) -> None:
    """Four thoughts of ten thousand tokens fill an agent's context."""
    folder = make_run(make_rows(1))
    RunDir(folder).append_jsonl("rollouts.jsonl", [make_row("x" * 5000, [64])])
    _, found = call_here("inspect_completions.py", folder, "--max-chars", "100")
    assert len(found["completions"][0]["thinking"]) < 120 and " [...] " in found["completions"][0]["thinking"]


# ----------------------------------------------------------------------------------------------- compare_runs.py


@pytest.mark.slow
def test_two_real_runs_are_compared(real_run: Path, tmp_path: Path) -> None:
    """A run and the same run again: no difference, no key that differs, and neither is better."""
    other = tmp_path / "other"
    shutil.copytree(real_run, other)
    code, found, errors = call("compare_runs.py", real_run, other)
    assert code == 0, errors
    assert found["same_prompts"] and found["keys_that_differ"] == {}
    assert found["difference"]["value"] == 0 and found["better"] == "neither"
    assert found["a"]["training_seconds"] > 0


def write_evaluation(folder: Path, right: int, digest: str = "same") -> None:
    """after.json with `right` of 100 prompts right."""
    shares = [1.0] * right + [0.0] * (100 - right)
    found = Evaluation("after", 100, 1, 1.0, 48, right / 100, right / 100 - 0.1, right / 100 + 0.1)
    found.prompts_digest, found.per_prompt = digest, shares
    RunDir(folder).write_json("after.json", found.to_dict())


@pytest.mark.parametrize(("right", "better"), [(80, "b"), (52, "neither"), (20, "a")])
def test_two_runs_are_compared(right: int, better: str, make_run: Callable[..., Path]) -> None:
    """A difference is told with its interval and with the keys that made it; one within the interval is none."""
    a = make_run(make_rows())
    b = make_run(make_rows(), "finished", ("run.name=b", "rloo.learning_rate=0.01", "model.lora.r=8"))
    write_evaluation(a, 50)
    write_evaluation(b, right)
    code, found = call_here("compare_runs.py", a, b)
    assert code == 0 and found["same_prompts"] and found["better"] == better
    assert found["difference"]["low"] < found["difference"]["value"] < found["difference"]["high"]
    assert found["keys_that_differ"] == {"model.lora.r": [16, 8], "rloo.learning_rate": [0.002, 0.01]}
    assert (found["a"]["accuracy"], found["b"]["accuracy"]) == (0.5, right / 100)


def test_a_run_that_was_not_measured_cannot_be_compared(make_run: Callable[..., Path]) -> None:
    """Comparing rewards of training instead would compare prompts."""
    a, b = make_run(make_rows()), make_run(make_rows(), "finished", ("run.name=b",))
    write_evaluation(a, 50)
    code, found = call_here("compare_runs.py", a, b)
    assert code == 4 and f"{b} has no after.json" in found["error"]

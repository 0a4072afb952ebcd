"""What a plan does not count: the margin, the verdict between fitting and not, and machines without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit import load_config, plan_vram
from rloo_kit.cli import app
from rloo_kit.config.run import RunConfig
from rloo_kit.plan import load as plan_load
from rloo_kit.plan.planner import find_machine_problem
from rloo_kit.plan.result import Machine
from rloo_kit.plan.without_gpu import MOST_WEIGHTS, ON_CPU, ON_GPU, fitting_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
THINKING = CONFIGS / "qwen3_4b_thinking_12gb.yaml"
SMALL = CONFIGS / "arithmetic_thinking.yaml"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_load, "is_cpu_torch", lambda: True)
    monkeypatch.setattr(plan_load, "available_gib", lambda: 24.0)


def tight_plan(**words: Any) -> Any:
    """As many rows as the file says, on a GPU that holds them with 0.01 GiB to spare."""
    run = load_config(THINKING, "rollout.rows=8", **words)
    peak = plan_vram(run, 24).rollout_gib
    return plan_vram(run, peak + plan_load.RESERVE_GIB + 0.01)


def test_a_plan_by_a_hair_is_tight() -> None:
    """`rloo-kit plan` said "Fits: 0.01 GiB to spare" above its own note that the true figure is larger."""
    plan = tight_plan()
    assert plan.headroom_gib == pytest.approx(0.01) and plan.verdict == "tight" and plan.fits
    reasons = " ".join(margin.reason for margin in plan.margins)
    assert "16 bit" in reasons and "not measured" in reasons
    assert "Tight: 0.01 GiB to spare" in str(plan) and "Fits" not in str(plan)
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["verdict"] == "tight" and found["margin_gib"] == pytest.approx(plan.margin_gib, abs=0.001)
    assert sum(one["gib"] for one in found["margins"]) == pytest.approx(plan.margin_gib, abs=0.01)


def test_the_exit_code_is_1_where_it_does_not_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that plans for a smaller GPU must not take a warning for a refusal, nor the other way."""
    small = str(SMALL)
    asked = {"fits": 24.0, "tight": plan_vram(load_config(SMALL)).peak_gib + 0.3001, "does not fit": 0.5}
    for verdict, free in asked.items():
        monkeypatch.setattr(plan_load, "available_gib", lambda free=free: free)
        done = CliRunner().invoke(app, ["plan", small, "--json"])
        assert json.loads(done.stdout)["verdict"] == verdict
        assert done.exit_code == (1 if verdict == "does not fit" else 0), done.stdout


def test_a_laptop_without_a_gpu_gets_no_bare_fits() -> None:
    """`rloo-kit plan` said "Fits" for a 4B model on a laptop, where a step takes hours."""
    plan = plan_vram(load_config(THINKING))
    assert plan.headroom_gib > 0 and plan.no_gpu is not None
    words = " ".join(str(plan).split())
    assert "No GPU: " in words and "--gpu-gib N" in words and ON_CPU in words and "days" in words
    assert not any(line.startswith(("Fits", "Tight")) for line in str(plan).splitlines())
    assert plan.to_dict()["no_gpu"] == plan.no_gpu.text
    assert plan_vram(load_config(THINKING), 12).no_gpu is None and plan_vram(load_config(SMALL)).no_gpu is None


def test_the_bound_is_where_steps_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound passes what a CPU trains in an evening and refuses what takes it a month. With a constant for a core's
    speed, `init` promised 12 s a step on a machine where it took 49. Measured on one core of that machine, which
    multiplies at 70 GFLOPS: a step of 64 completions, 12 s to sample 24 tokens and 5 s to train a quarter of the groups
    (so 32 s with a signal in all), and 88 s of 64 tokens."""
    from rloo_kit.plan import without_gpu
    from rloo_kit.plan.load import read_load

    monkeypatch.setattr(without_gpu, "matrix_flops", lambda: 70e9)
    for tokens, prompt, took in ((24, 64, 32), (64, 128, 88)):
        words = [f"rloo.max_completion_length={tokens}", "rloo.per_device_train_batch_size=64"]
        words += ["model.name=smollm2/instruct", "model.max_seq_length=224", f"data.max_prompt_length={prompt}"]
        run = load_config(SMALL, *words)
        load = read_load(run, plan_load.find_machine())
        seconds = without_gpu._step_s(run, load)
        assert seconds == pytest.approx(took, rel=0.25)
        assert f"{without_gpu._time(seconds)}, 50 of them" in without_gpu.describe_step(run, load)
    seconds = without_gpu.STEP_FLOPS * MOST_WEIGHTS * 32 * 512 / 0.3e12
    assert 60 < seconds < 300 and 200 * seconds > 3 * 3600


def problem(run: RunConfig, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in ("planner", "engines"):
        monkeypatch.setattr(f"rloo_kit.plan.{module}.find_machine", lambda *_: machine)
    return find_machine_problem(run)


def test_the_model_is_checked_against_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 4B model was downloaded to a laptop before anything said that it cannot train it."""
    laptop = Machine("the CPU", 16.0, 0.3, False)
    found = problem(load_config(THINKING), laptop, monkeypatch)
    assert "No GPU" in found.found and ON_CPU in found.fix and "--gpu-gib" in found.fix
    gpu = Machine("a GPU", 11.2, 0.8, True)
    assert problem(load_config(THINKING), gpu, monkeypatch) is None
    assert problem(load_config(SMALL), laptop, monkeypatch) is None
    wanted = load_config(THINKING, "rollout.rows=16")
    found = problem(wanted, gpu, monkeypatch)
    assert "does not fit" in found.found and found.fix == "set rollout.rows=8" and found.level == "warning"
    found = problem(load_config(THINKING, "rloo.beta=0.05"), Machine("a GPU", 3.0, 0.8, True), monkeypatch)
    assert found.level == "error" and "larger GPU" in found.fix
    assert problem(load_config(THINKING, model={"name": "me/unknown"}), laptop, monkeypatch) is None


@pytest.mark.parametrize(("file", "size"), ON_GPU)
def test_the_configs_that_are_named_exist_and_fit(file: str, size: int) -> None:
    """A fix that names a config which is gone, or does not fit the GPU either, is worse than none."""
    gib = size * 1e9 / 2**30
    assert plan_vram(load_config(ROOT / file), gib).verdict == "fits"
    assert fitting_config(Machine("a GPU", gib, 0.8, True)) == file
    assert fitting_config(Machine("a GPU", 6.0, 0.8, True)) is None and (ROOT / ON_CPU).is_file()

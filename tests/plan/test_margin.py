"""What a plan does not count (the margin, the verdict between fitting and not, machines without a GPU), and its
hours: whose speed it is, and what they count."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit import load_config, plan_vram
from rloo_kit.cli import app
from rloo_kit.config.run import RunConfig
from rloo_kit.plan import parts, planner, speed
from rloo_kit.plan.planner import ON_CPU, ON_GPU, find_machine, find_machine_problem, fitting_config, read_workload
from rloo_kit.plan.speed import GPUS, LAUNCH_S, LAUNCHES_PER_LAYER, find_gpu, list_evaluations, token_step_s
from rloo_kit.plan.vram_plan import Machine

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
THINKING = CONFIGS / "qwen3_4b_thinking_12gb.yaml"
SMALL = CONFIGS / "arithmetic_thinking.yaml"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "is_cpu_torch", lambda: True)
    monkeypatch.setattr(planner, "available_gib", lambda: 24.0)


def test_a_plan_by_a_hair_is_tight() -> None:
    """`rloo-kit plan` said "Fits: 0.01 GiB to spare" above its own note that the true figure is larger."""
    run = load_config(THINKING, "rollout.rows=8")
    plan = plan_vram(run, plan_vram(run, 24).rollout_gib + planner.RESERVE_GIB + 0.01)
    assert plan.headroom_gib == pytest.approx(0.01) and plan.verdict == "tight" and plan.fits
    reasons = " ".join(margin.reason for margin in plan.margins)
    assert "16 bit" in reasons and "not measured" in reasons
    assert "Tight: 0.01 GiB to spare" in str(plan) and "Fits" not in str(plan)
    values = json.loads(json.dumps(plan.to_dict()))
    assert sum(margin["gib"] for margin in values["margins"]) == pytest.approx(values["margin_gib"], abs=0.01)


def test_the_exit_code_is_1_where_it_does_not_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that plans for a smaller GPU must not take a warning for a refusal, nor the other way."""
    small = str(SMALL)
    asked = {"fits": 24.0, "tight": plan_vram(load_config(SMALL)).peak_gib + 0.3001, "does not fit": 0.5}
    for verdict, free in asked.items():
        monkeypatch.setattr(planner, "available_gib", lambda free=free: free)
        done = CliRunner().invoke(app, ["plan", small, "--json"])
        assert json.loads(done.stdout)["verdict"] == verdict
        assert done.exit_code == (1 if verdict == "does not fit" else 0), done.stdout


def test_the_bound_is_where_steps_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound passes what a CPU trains in an evening and refuses what takes it a month. With a constant for a core's
    speed, `init` promised 12 s a step on a machine where it took 49. Measured on one core of that machine, which
    multiplies at 70 GFLOPS: a step of 64 completions, 12 s to sample 24 tokens and 5 s to train a quarter of the groups
    (so 32 s with a signal in all), and 88 s of 64 tokens."""
    monkeypatch.setattr(speed, "matrix_flops", lambda: 70e9)
    for tokens, prompt, took in ((24, 64, 32), (64, 128, 88)):
        words = [f"rloo.max_completion_length={tokens}", "rloo.per_device_train_batch_size=64"]
        words += ["model.name=smollm2/instruct", "model.max_seq_length=224", f"data.max_prompt_length={prompt}"]
        run = load_config(SMALL, *words)
        work = read_workload(run, planner.find_machine())
        seconds = speed.step_on_cpu_s(run, work)
        assert seconds == pytest.approx(took, rel=0.25)
        said = speed.describe_step(run, work)
        assert f"{seconds:.0f} s, 50 of them" in said and "timed just now" in said, "a busy machine is slower"


def test_the_model_is_checked_against_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 4B model was downloaded to a laptop before anything said that it cannot train it."""

    def problem(run: RunConfig, machine: Machine) -> Any:
        monkeypatch.setattr(planner, "find_machine", lambda *_: machine)
        return find_machine_problem(run)

    laptop = Machine("the CPU", 16.0, 0.3, False)
    found = problem(load_config(THINKING), laptop)
    assert "No GPU" in found.found and ON_CPU in found.fix and "--gpu-gib" in found.fix
    gpu = Machine("a GPU", 11.2, 0.8, True)
    assert problem(load_config(THINKING), gpu) is None
    assert problem(load_config(SMALL), laptop) is None
    wanted = load_config(THINKING, "rollout.rows=16")
    found = problem(wanted, gpu)
    assert "does not fit" in found.found and found.fix == "set rollout.rows=8" and found.level == "warning"
    found = problem(load_config(THINKING, "rloo.beta=0.05"), Machine("a GPU", 3.0, 0.8, True))
    assert found.level == "error" and "larger GPU" in found.fix
    assert problem(load_config(THINKING, model={"name": "me/unknown"}), laptop) is None


def test_the_configs_that_are_named_exist() -> None:
    """A fix that names a config which is gone, or is for another GPU, is worse than none; that each fits the GPU of its
    header is tested with the configs."""
    for file, size in ON_GPU:
        assert fitting_config(Machine("a GPU", size * 1e9 / 2**30, 0.8, True)) == file and (ROOT / file).is_file()
    assert fitting_config(Machine("a GPU", 6.0, 0.8, True)) is None and (ROOT / ON_CPU).is_file()


def test_measured_peaks_correct_computed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that a GPU has contradicted goes on promising that a run fits; CUDA's context is not torch's to exceed.
    What a GPU's allocator took says nothing about a laptop's memory."""
    run = load_config(THINKING, "rollout.rows=8", "rloo.tokens_per_pass=4608")
    before = plan_vram(run, 12e9 / 2**30)
    found = {"source": "a GPU", "factors": {"unsloth rollout": 1.1, "unsloth training": 1.5}}
    monkeypatch.setattr(parts, "load_corrections", lambda: found)
    after = plan_vram(run, 12e9 / 2**30)
    assert after.rollout_gib == pytest.approx(0.7 + 1.1 * (before.rollout_gib - 0.7))
    assert after.training_gib == pytest.approx(0.7 + 1.5 * (before.training_gib - 0.7))
    assert "rollout x 1.10 (a GPU)" in str(after) and "correction" not in str(before)
    assert not any(part.name == "correction" for part in plan_vram(load_config(SMALL)).parts)


# ------------------------------------------------------------------------------------------ hours


def token_ms(name: str, rows: int, words: tuple[str, ...] = (), padded: bool = False, **changes: Any) -> float:
    """Milliseconds of a token of the 12 GB config."""
    gpu = next(gpu for gpu in GPUS if gpu.name == name)
    engine = changes.pop("engine", "generate")
    work = read_workload(load_config(THINKING, *words), find_machine(gpu.memory_gb * 1e9 / parts.GIB), engine=engine)
    return 1e3 * token_step_s(replace(work, **changes), rows, gpu, padded)


def test_what_a_token_takes() -> None:
    """The plan charged launches that CUDA graphs replay, unpacking where a fused product reads 4 bits, and one read of
    the cache where Unsloth copies it for every query head."""
    eager = LAUNCHES_PER_LAYER * 36 * LAUNCH_S * 1e3
    assert token_ms("H100", 1) < eager < token_ms("H100", 1, fused=False), "Unsloth replays CUDA graphs"
    assert token_ms("RTX 4090", 1, engine="vllm") < eager < token_ms("RTX 4090", 1, engine="vllm", enforce_eager=True)
    for name, fused, unpacked in (("RTX 3060", 1, 2), ("RTX 4090", 4, 5), ("T4", 4, 5)):
        assert token_ms(name, unpacked) > 1.6 * token_ms(name, fused)
    assert token_ms("RTX 3060", 8, engine="vllm") < 0.5 * token_ms("RTX 3060", 8)
    sixteen = token_ms("RTX 4090", 16, ("model.load_in_4bit=false", "model.name=Qwen/Qwen3-4B-Thinking-2507"))
    assert sixteen < token_ms("RTX 4090", 16), "16 bits need no unpacking"
    short = ("rloo.max_completion_length=640", "rloo.thinking_budget=480", "rloo.answer_budget=128")
    assert 1.2 < token_ms("RTX 3060", 32, short, padded=True) / token_ms("RTX 3060", 32, short) < 2
    for name in ("RTX 3060", "RTX 4070", "RTX 4090"):
        assert token_ms(name, 8, engine="native") < 0.55 * token_ms(name, 8), "graphs, fused products, no copies"
    mixed = {"engine": "native", "four_bit": False, "weight_bytes": 4, "compute_bytes": 2}
    assert token_ms("H100", 1, **mixed) > eager, "float32 weights in mixed precision go through the modules"


def test_evaluations_are_part_of_the_hours() -> None:
    """Two evaluations of an hour each were left out of a run's 43."""
    words = ["eval.thinking_budgets=[1024]", "eval.greedy=true", "eval.batch_size=32", "eval.num_samples=2"]
    words += ["rollout.engine=generate"]
    run = load_config(THINKING, *words)
    passes = [(200, 2, 4087), (100, 1, 4087), (100, 1, 1024 + 23 + 512)]
    assert list_evaluations(run, 4087) == 2 * passes
    words = ["data.test_size=0.5", "eval.num_prompts=1000"]
    assert list_evaluations(load_config(THINKING, *words), 4087)[0] == (1000, 1, 4087), "it was 100"
    words = ["run.evaluate=false", "eval.every_steps=80", "eval.every_prompts=64"]
    assert list_evaluations(load_config(THINKING, *words), 4087) == 4 * [(64, 1, 4087)]
    step = plan_vram(run, 12e9 / 2**30).step
    assert step is not None and step.hours == pytest.approx((200 * step.seconds + step.evaluation_s) / 3600)
    assert step.evaluation_s > 3600 and f"{step.evaluation_s / 3600:.1f} of them evaluations" in str(step)
    assert step.to_dict()["evaluation_s"] == round(step.evaluation_s, 1)
    plan = plan_vram(load_config(THINKING, "rloo.max_steps=100"), 12e9 / 2**30)
    assert plan.step is not None and plan.step.gpu == "RTX 3060" and "computed, not measured" in str(plan.step)
    assert f"{plan.step.seconds / 60:.0f} min, 100 steps {plan.step.hours:.3g} h" in " ".join(str(plan).split())
    assert plan_vram(run, 140).step is None, "an unknown GPU's speed is not known"


def test_a_gpu_is_known_by_its_name_and_size() -> None:
    """A laptop's GPU and a slice of a large one have the name of one that is much faster."""
    for name, gib, expected in (
        ("NVIDIA GeForce RTX 3060", 12.0, ("RTX 3060", 12)),
        ("NVIDIA GeForce RTX 3060 Ti", 8.0, ("RTX 3060 Ti", 8)),
        ("NVIDIA A100-SXM4-80GB", 79.25, ("A100", 80)),
        ("NVIDIA A100-PCIE-40GB", 39.39, ("A100", 40)),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8.0, None),
        ("NVIDIA GeForce RTX 4070 SUPER", 12.0, None),
        ("NVIDIA A10", 22.5, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, None),
        ("a GPU with 11.18 GiB", 11.18, ("RTX 3060", 12)),
        ("a GPU with 140 GiB", 140, None),
    ):
        found = find_gpu(name, gib)
        assert (found and (found.name, found.memory_gb)) == expected, name

"""The plan of a run: what it finds out by itself, which rows fit, what it says where a run does not fit, its hours."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rloo_kit import load_config, plan_vram
from rloo_kit.cli import app
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan import planner
from rloo_kit.plan.parts import rollout_gib, unmeasured_gib
from rloo_kit.plan.planner import ON_CPU, ON_GPU, find_machine, find_machine_problem, fitting_config, read_workload
from rloo_kit.plan.shapes import find_shape
from rloo_kit.plan.speed import count_evaluated, find_gpu
from rloo_kit.plan.vram_plan import EngineChoice, Machine
from rloo_kit.system.memory import _free_in_container, available_gib

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
THINKING = CONFIGS / "qwen3_4b_thinking_12gb.yaml"
SMALL = CONFIGS / "arithmetic_thinking.yaml"
A10 = {"name": "A10", "capability": [8, 6], "total": 24 * 2**30, "used": 6 * 2**30, "uuid": "GPU-b"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "is_cpu_torch", lambda: True)
    monkeypatch.setattr(planner, "available_gib", lambda: 24.0)


def shape_named(name: str, **keys: Any) -> Any:
    return find_shape(load_config(THINKING, model={"name": name} | keys))


def test_an_unknown_model_is_refused_with_what_to_do() -> None:
    """A guess by part of the name plans a mixture of experts as a dense model of its size."""
    for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B-AWQ", "me/my-qwen3-4b"):
        with pytest.raises(ConfigError, match=re.escape(f"hf download {name} config.json")):
            shape_named(name)


def test_a_file_in_the_cache_wins_over_the_table(tmp_path: Path) -> None:
    """Of the branch main; the cache is read as files, without the library."""
    name = "Qwen/Qwen3-4B"
    config = {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    }  # fmt: skip
    before = shape_named(name)
    for commit, layers in (("old", 1), ("new", 35), ("other", 2)):
        folder = tmp_path / "hub" / "models--Qwen--Qwen3-4B" / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("new")
    after = shape_named(name)
    assert (before.num_layers, after.num_layers) == (36, 35) and after.source.endswith("config.json")


def test_folders_of_models_and_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    """An adapter's folder has no config.json; its base model has, and its rank is the adapter's own."""
    assert shape_named(str(tiny_folder)).vocab_size == 264
    adapter = {"base_model_name_or_path": str(tiny_folder), "r": 3, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    run = load_config(THINKING, model={"name": str(tmp_path)}, rloo={"beta": 0.1})
    work = read_workload(run, find_machine(12))
    assert (work.lora_rank, work.lora_targets, work.shape.vocab_size) == (3, ("q_proj",), 264)
    assert work.reference == "adapter", "the start of training is no longer the base model"
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="a folder without config.json"):
        shape_named(str(tmp_path))
    # experts counted as one dense layer come out at a tenth of their size
    config = json.loads((tiny_folder / "config.json").read_text())
    for change in ({"model_type": "mamba"}, {"num_experts": 128}, {"hidden_size": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match="cannot be planned") as caught:
            shape_named(str(tmp_path))
    assert "lacks hidden_size" in str(caught.value), "a default would plan another model"


def limit_for(work: Any, rows: int) -> float:
    """GiB in which so many rows fit, the margin left free."""
    return rollout_gib(work, rows) + unmeasured_gib(work, rollout_gib(work, rows), "rollout")


def test_a_rollout_on_a_server_takes_nothing_here(tiny_model: Any) -> None:
    """The plan lowered what only the server has to hold; and one that does not fit sent one request at a time."""
    from rloo_kit.training.memory_watch import planned_limits

    words = ["rollout.engine=server", "rollout.server_url=http://node1:8000", "rloo.num_generations=16"]
    words += ["rloo.gradient_accumulation_steps=16", "rloo.max_completion_length=4096"]
    here, there = (plan_vram(load_config(THINKING, *chosen), 12) for chosen in (words[2:], words))
    assert here.rollout_gib > there.rollout_gib and there.binds == "training"
    assert there.rows == there.completions > here.rows
    assert "rollout.rows" not in str(there)
    assert "at once" not in str(there) and "not planned" in str(there) and "at once" in str(here)
    policy = SimpleNamespace(model=tiny_model, backend="transformers")
    run = load_config(SMALL, *words[:2])
    assert "rollout_rows" not in planned_limits(run, policy)


def test_a_run_that_does_not_fit_says_what_to_change() -> None:
    """By cost: time first, then precision, then what can be learnt; each change is valid, and all together fit."""
    words = ["rloo.beta=0.05", "rollout.rows=16", "model.load_in_4bit=false", "model.name=Qwen/Qwen3-4B"]
    words += ["rloo.thinking_budget=null", "rloo.answer_budget=null"]
    file = CONFIGS / "qwen3_4b_thinking.yaml"
    plan = plan_vram(load_config(file, *words), 5)
    assert not plan.fits and plan.headroom_gib < 0
    keys = [change.key for change in plan.changes]
    assert keys == ["rollout.rows", "rloo.memory", "model.load_in_4bit", "rloo.max_completion_length"]
    assert [change.fits for change in plan.changes] == [False] * 3 + [True]
    changed = plan_vram(load_config(file, *words, *(change.override for change in plan.changes)), 5)
    assert changed.fits and not changed.changes
    assert changed.peak_gib == pytest.approx(max(plan.changes[-1].rollout_gib, plan.changes[-1].training_gib))
    # lowering max_completion_length below the budgets is refused by the configuration
    plan = plan_vram(load_config(THINKING, "rloo.thinking_budget=3500", "rloo.answer_budget=500", "rloo.memory=low"), 5)
    assert [change.key for change in plan.changes] == ["rloo.thinking_budget"] and plan.changes[0].fits
    assert "docs/plan.md#out-of-memory" in str(plan_vram(load_config(THINKING), 2)), "nothing is enough"


def test_the_whole_memory_of_the_gpu_counts(run_fresh: Any, repository: Path) -> None:
    """What is free now depends on what the notebook has loaded already: rows would fall from cell to cell."""
    code = f"run = rloo_kit.load_config({str(THINKING)!r})\nplan = rloo_kit.plan_vram(run)\n"
    code += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    code += "print(plan.machine.name, plan.machine.total_gib, plan.rows)"
    done = run_fresh(code, [A10])
    assert done.stdout.strip() == "A10 24.0 26", done.stderr


def test_without_a_gpu_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    """A container's limit is below the machine's memory, and the files it has read are no burden."""
    import psutil

    total = psutil.virtual_memory().total / 2**30
    assert 0.05 < available_gib() <= total + 1
    machine = find_machine()
    assert not machine.on_cuda and machine.total_gib <= total + 1
    assert _free_in_container(tmp_path) > 2**50
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 400\nactive_file 300\nfile_mapped 7\n")
    assert _free_in_container(tmp_path) == 1700


def test_widths_follow_the_run() -> None:
    """Full fine-tuning keeps float32 weights, and a cache as wide, while it computes in 16 bit."""

    def widths(gib: float | None, *words: str) -> tuple[int, int, bool]:
        work = read_workload(load_config(THINKING, *words), find_machine(gib))
        return work.weight_bytes, work.compute_bytes, work.fused

    assert widths(24) == (2, 2, True)
    assert widths(24, "model.backend=transformers") == (2, 2, False)
    assert widths(24, "model.lora=null", "model.load_in_4bit=false", "model.name=Qwen/Qwen3-0.6B") == (4, 2, False)
    assert widths(24, "model.dtype=float32") == (4, 4, True)
    assert widths(None) == (4, 4, False)
    run = load_config(THINKING, rloo={"thinking_budget": 2048, "answer_budget": 256})
    longest = read_workload(run, find_machine(12)).completion_tokens
    assert 2048 + 256 < longest < 2048 + 256 + 64, "both budgets and the closing text bound it"
    run.rloo.tools = ["my_tools:search"]
    each_turn = read_workload(run, find_machine(12)).completion_tokens
    assert each_turn == run.rloo.max_completion_length > longest, "each turn has its budgets"
    for gib in (0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"gpu_gib is {gib}"):
            plan_vram(load_config(THINKING), gib)


def test_training_generates_as_many_rows_as_are_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Any
) -> None:
    """A plan that is printed and not followed runs out of memory; a model without a plan is trained all the same."""
    from rloo_kit.training.memory_watch import planned_limits

    run = load_config(SMALL, "rloo.tokens_per_pass=512", "rloo.memory=low")
    policy = SimpleNamespace(model=tiny_model, backend="transformers")
    monkeypatch.setattr(planner, "available_gib", lambda: 8.0)
    plain = load_config(SMALL)  # 8192 tokens were planned where the trainer takes 2048
    assert plan_vram(plain).tokens_per_pass == 2048 and "tokens_per_pass" not in planned_limits(plain, policy)
    capsys.readouterr()
    work = read_workload(run, find_machine(), tiny_model.config.to_dict())
    free = limit_for(work, 100) + planner.CPU_RESERVE_GIB
    monkeypatch.setattr(planner, "available_gib", lambda: free + 1e-6)
    assert planned_limits(run, policy) == {"rollout_rows": 100}
    assert "100 of the 128 completions of a rollout are generated at once" in capsys.readouterr().out
    run.rollout.rows = 7
    monkeypatch.setattr(planner, "available_gib", lambda: 0.5)
    assert planned_limits(run, policy)["rollout_rows"] == 7
    printed = capsys.readouterr().out
    assert "generated at once" not in printed and "Does not fit" in printed
    monkeypatch.setattr(tiny_model.config, "to_dict", lambda: {"model_type": "mamba"})
    assert planned_limits(run, policy) == {} and "cannot be planned" in capsys.readouterr().out


def test_limits_are_those_of_the_engine_that_was_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Any
) -> None:
    """A policy that was loaded without vLLM got the limits of vLLM's pool, and the other way round."""
    from rloo_kit.preflight.trial_steps import load_of
    from rloo_kit.training.memory_watch import planned_limits

    run = load_config(SMALL, "model.load_in_4bit=false")
    policy = SimpleNamespace(model=tiny_model, backend="transformers")
    config = tiny_model.config.to_dict()
    free = limit_for(read_workload(run, find_machine(), config), 100) + planner.CPU_RESERVE_GIB + 1e-6
    monkeypatch.setattr(planner, "available_gib", lambda: free)
    chosen = EngineChoice("vllm", "installed, and it fits")
    monkeypatch.setattr("rloo_kit.plan.planner.plan_engine", lambda *_: chosen)
    assert plan_vram(run, config=config).engine == chosen
    assert planned_limits(run, policy)["rollout_rows"] == 100 and load_of(run, policy).engine == "native"
    assert "100 of the 128" in capsys.readouterr().out

    monkeypatch.setattr("rloo_kit.plan.planner.plan_engine", lambda *_: EngineChoice("native", "vLLM does not fit"))
    monkeypatch.setattr("rloo_kit.rollout.choice.find_vllm", lambda model: object() if model is tiny_model else None)
    assert "rollout_rows" not in planned_limits(run, policy) and load_of(run, policy).engine == "vllm"
    assert "generated at once" not in capsys.readouterr().out
    plan = plan_vram(run, config=config, engine="vllm")
    assert plan.vllm is not None and plan.rows == plan.vllm.max_num_seqs
    asked = load_config(SMALL, "rollout.engine=vllm")
    assert "rollout_rows" not in planned_limits(asked, policy)


def test_the_page_has_the_rows_of_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/plan.md had a row more here and three fewer there: its table is typed in by hand."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    page = (CONFIGS.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| ([\d.]+B) \| (.+) \|$", page, re.MULTILINE)
    assert len(lines) == 5
    for size, cells in lines:
        name = f"model.name=unsloth/Qwen3-{size}-unsloth-bnb-4bit"
        run = load_config(CONFIGS / "qwen3_0_6b.yaml", name, "rloo.gradient_accumulation_steps=64")
        plans = [plan_vram(run, gpu_gib=gib) for gib in (8, 12, 16, 24, 40)]
        found = ["-" if plan.verdict == "does not fit" else str(plan.rows) for plan in plans]
        assert cells.split(" | ") == found, size


# ------------------------------------------------------------------------------------------ fits, tight, hours


def test_a_plan_by_a_hair_is_tight() -> None:
    """`rloo-kit plan` said "Fits: 0.01 GiB to spare" above its own note that the true figure is larger."""
    run = load_config(THINKING, "rollout.rows=8")
    plan = plan_vram(run, plan_vram(run, 24).rollout_gib + planner.RESERVE_GIB + 0.01)
    assert plan.headroom_gib == pytest.approx(0.01) and plan.verdict == "tight" and plan.fits
    assert "Tight: 0.01 GiB to spare" in str(plan) and "Fits" not in str(plan)
    assert 0.1 * plan.rollout_gib < json.loads(json.dumps(plan.to_dict()))["margin_gib"] < 0.2 * plan.rollout_gib


@pytest.mark.usefixtures("no_gpu")
def test_the_exit_code_is_1_where_it_does_not_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that plans for a smaller GPU must not take a warning for a refusal, nor the other way."""
    small = [str(SMALL), "rollout.rows=128", "rloo.tokens_per_pass=2048"]
    asked = {"fits": 24.0, "tight": plan_vram(load_config(*small)).peak_gib + 0.3001, "does not fit": 0.5}
    for verdict, free in asked.items():
        monkeypatch.setattr(planner, "available_gib", lambda free=free: free)
        done = CliRunner().invoke(app, ["plan", *small, "--json"])
        assert json.loads(done.stdout)["verdict"] == verdict
        assert done.exit_code == (1 if verdict == "does not fit" else 0), done.stdout


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
    """A fix that names a config which is gone, or is for another GPU, is worse than none."""
    for file, size in ON_GPU:
        assert fitting_config(Machine("a GPU", size * 1e9 / 2**30, 0.8, True)) == file and (ROOT / file).is_file()
    assert fitting_config(Machine("a GPU", 6.0, 0.8, True)) is None and (ROOT / ON_CPU).is_file()


# ------------------------------------------------------------------------------------------ hours


def test_evaluations_are_part_of_the_hours() -> None:
    """Two evaluations of an hour each were left out of a run's 43."""
    words = ["eval.thinking_budgets=[1024]", "eval.greedy=true", "eval.batch_size=32", "eval.num_samples=2"]
    run = load_config(THINKING, *words, "rollout.engine=generate")
    assert count_evaluated(run) == 2 * (200 + 100 + 100)
    assert count_evaluated(load_config(THINKING, "data.test_size=0.5", "eval.num_prompts=1000")) == 2000, "it was 200"
    words = ["run.evaluate=false", "eval.every_steps=80", "eval.every_prompts=64"]
    assert count_evaluated(load_config(THINKING, *words)) == 4 * 64
    plan = plan_vram(run, 12e9 / 2**30)
    step = plan.step
    assert step is not None and step.gpu == "RTX 3060" and step.evaluation_s > 3600
    assert step.hours == pytest.approx((200 * step.step_s + step.evaluation_s) / 3600)
    whole = (
        f"{step.step_s / 60:.0f} min, 200 steps {step.hours:.3g} h ({step.evaluation_s / 3600:.1f} of them evaluations"
    )
    assert whole in " ".join(str(plan).split()) and "computed, not measured" in str(step)
    assert plan.to_dict()["step"]["step_s"] == pytest.approx(step.step_s, abs=0.001)
    assert plan_vram(run, 140).step is None, "an unknown GPU's speed is not known"


def test_a_gpu_is_known_by_its_name_and_size() -> None:
    """A laptop's GPU and a slice of a large one have the name of one that is much faster."""
    for name, gib, expected in (
        ("NVIDIA GeForce RTX 3060", 12.0, ("RTX 3060", 12)),
        ("NVIDIA GeForce RTX 3060 Ti", 8.0, ("RTX 3060 Ti", 8)),
        ("NVIDIA A100-SXM4-80GB", 79.25, ("A100", 80)),
        ("NVIDIA L4", 22.5, ("L4", 24)),
        ("a GPU with 74.5 GiB", 74.5, ("H100", 80)),
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

"""The plan of a run's memory: what it finds out by itself, which rows fit, what it says where a run does not fit."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.errors import ConfigError
from rloo_kit.plan import planner
from rloo_kit.plan.parts import rollout_gib, unmeasured_gib
from rloo_kit.plan.planner import find_machine, read_workload
from rloo_kit.plan.shapes import find_shape
from rloo_kit.plan.vram_plan import EngineChoice
from rloo_kit.system.memory import _free_in_container, available_gib

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
THINKING = CONFIGS / "qwen3_4b_thinking_12gb.yaml"
A10 = {"name": "A10", "capability": [8, 6], "total": 24 * 2**30, "used": 6 * 2**30, "uuid": "GPU-b"}


def shape_named(name: str, **keys: Any) -> Any:
    return find_shape(load_config(THINKING, model={"name": name} | keys))


def test_an_unknown_model_is_refused_with_what_to_do() -> None:
    """A guess by part of the name plans a mixture of experts as a dense model of its size."""
    for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B-AWQ", "me/my-qwen3-4b"):
        with pytest.raises(ConfigError, match=re.escape(f"hf download {name} config.json")):
            shape_named(name)


def test_a_file_in_the_cache_wins_over_the_table(tmp_path: Path) -> None:
    """It knows which layers a quantised checkpoint keeps in 16 bit; the cache is read as files, without the library."""
    name = "unsloth/Qwen3-4B-unsloth-bnb-4bit"
    config = {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
        "quantization_config": {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "model.layers.3.mlp"]},
    }  # fmt: skip
    before = plan_vram(load_config(THINKING, model={"name": name}), gpu_gib=12)
    for commit, layers in (("old", 1), ("new", 36), ("other", 2)):
        folder = tmp_path / "hub" / "models--unsloth--Qwen3-4B-unsloth-bnb-4bit" / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("new")
    after = plan_vram(load_config(THINKING, model={"name": name}), gpu_gib=12)
    kept = 3 * 2560 * 9728 * (2 - 0.516) / 2**30
    assert after.training_gib - before.training_gib == pytest.approx(kept, rel=0.01)
    assert [any("keeps in 16 bit" in one.reason for one in plan.margins) for plan in (before, after)] == [True, False]


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
    lacks = {"model_type": "qwen3_5", "layer_types": None}
    for change in ({"model_type": "mamba"}, {"num_experts": 128}, {"hidden_size": None}, lacks):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match="cannot be planned") as caught:
            shape_named(str(tmp_path))
    assert "lacks layer_types, linear_num_key_heads" in str(caught.value), "a default would plan another model"


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
    run = load_config(CONFIGS / "arithmetic_thinking.yaml", *words[:2])
    assert "rollout_rows" not in planned_limits(run, policy)


def test_a_run_that_does_not_fit_says_what_to_change() -> None:
    """The order is that of the cost: time first, then precision, then what can be learnt. Each change is one that the
    configuration takes, and all of them together fit."""
    words = ["rloo.beta=0.05", "rollout.rows=16", "model.gradient_checkpointing=false", "model.load_in_4bit=false"]
    words += ["rloo.optim=adamw_torch", "model.name=Qwen/Qwen3-4B", "rloo.thinking_budget=null"]
    words += ["rloo.answer_budget=null"]
    file = CONFIGS / "qwen3_4b_thinking.yaml"
    plan = plan_vram(load_config(file, *words), 6)
    assert not plan.fits and plan.binds == "training" and plan.headroom_gib < 0
    keys = [change.key for change in plan.changes]
    assert keys == [
        "rollout.rows", "rloo.memory", "model.gradient_checkpointing", "rloo.optim", "model.load_in_4bit",
        "rloo.max_completion_length",
    ]  # fmt: skip
    assert [change.fits for change in plan.changes] == [False] * 5 + [True]
    changed = plan_vram(load_config(file, *words, *(change.override for change in plan.changes)), 6)
    assert changed.fits and not changed.changes
    assert changed.peak_gib == pytest.approx(max(plan.changes[-1].rollout_gib, plan.changes[-1].training_gib))
    # lowering max_completion_length below the budgets is refused by the configuration
    plan = plan_vram(load_config(THINKING, "rloo.thinking_budget=3500", "rloo.answer_budget=500", "rloo.memory=low"), 5)
    assert [change.key for change in plan.changes] == ["rloo.thinking_budget"] and plan.changes[0].fits


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
    """A plan that is printed and not followed runs out of memory all the same. A model that cannot be planned for is
    no reason not to train it."""
    from rloo_kit.training.memory_watch import planned_limits

    run = load_config(CONFIGS / "arithmetic_thinking.yaml", "rloo.tokens_per_pass=512", "rloo.memory=low")
    policy = SimpleNamespace(model=tiny_model, backend="transformers")
    monkeypatch.setattr(planner, "available_gib", lambda: 8.0)
    plain = load_config(CONFIGS / "arithmetic_thinking.yaml")  # 8192 tokens were planned where the trainer takes 2048
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
    """`auto` was planned again with the loaded model's config: a policy that was loaded without vLLM got the limits of
    vLLM's pool, and one that has it got rows that it does not take."""
    from rloo_kit.preflight.trial_steps import load_of
    from rloo_kit.training.memory_watch import planned_limits

    run = load_config(CONFIGS / "arithmetic_thinking.yaml", "model.load_in_4bit=false")
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
    asked = load_config(CONFIGS / "arithmetic_thinking.yaml", "rollout.engine=vllm")
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

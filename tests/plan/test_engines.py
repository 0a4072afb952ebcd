"""Which engine a run gets, and how vLLM divides the GPU with training."""

from dataclasses import replace
from pathlib import Path

import pytest

from rloo_kit import load_config, plan_vram
from rloo_kit.plan import parts, planner
from rloo_kit.plan.parts import GIB, comfortable_gib, rollout_gib, training_gib
from rloo_kit.plan.planner import find_machine, plan_engine, plan_vllm, read_workload
from rloo_kit.plan.shapes import PUBLISHED
from rloo_kit.plan.vram_plan import Machine
from rloo_kit.system.versions import VLLM_INSTALL
from tests.plan.test_shapes import work_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
THINKING = CONFIGS / "qwen3_4b_thinking_12gb.yaml"
HERE = Machine("an RTX 3060", 11.18, 0.8, True)
IN_16_BIT = ["model.load_in_4bit=false", "model.name=Qwen/Qwen3-4B-Thinking-2507"]


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch, *modules: str, version: str | None = None) -> None:
    """Exactly these modules are there, and that version of vLLM."""
    monkeypatch.setattr(planner, "is_importable", lambda name: name in modules)
    monkeypatch.setattr(planner, "installed_version", lambda name: version)


def gpu(gb: float) -> Machine:
    return find_machine(gb * 1e9 / GIB)


# Torch's peak in GiB by tokens of a pass and rows, of a 4B model in bf16 with an adapter: `load_vllm` of unsloth_zoo.
MEASURED = {
    (2048, 8): 0.18, (4096, 8): 0.32, (8192, 8): 0.62, (8192, 256): 1.45, (8192, 1024): 5.59, (32768, 8): 2.38,
}  # fmt: skip


def test_buffers_are_those_that_unsloth_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only measurement of vLLM's own memory at hand; a formula that misses it plans a pool that is not there."""
    work = work_of(PUBLISHED["4b"], four_bit=False, fused=False, engine="vllm", enforce_eager=True)
    outside = parts.OUTSIDE_GIB * GIB + parts.adapter_bytes(work)
    for (tokens, rows), measured in MEASURED.items():
        monkeypatch.setattr(parts.sizes, "BATCHED_TOKENS", tokens)
        assert (parts.buffer_bytes(work, rows) - outside) / GIB == pytest.approx(measured, rel=0.2)
    assert (parts.vllm_weight_bytes(work) + parts.adapter_bytes(work)) / GIB == pytest.approx(7.56, abs=0.02)


def test_shared_weights_are_counted_once() -> None:
    """Twice they are 2.5 GiB of a 12 GB GPU for nothing; once, where vLLM loads its own, the first rollout fails."""
    run = load_config(THINKING, "rollout.engine=vllm")
    shared, copied = plan_vllm(run, gpu(12)), plan_vllm(load_config(THINKING, "model.backend=transformers"), gpu(12))
    assert shared.max_num_seqs == 8 and copied.max_num_seqs < 8 and shared.pool_gib > copied.pool_gib
    for plan, words in ((shared, []), (copied, ["model.backend=transformers"])):
        found = plan_vram(load_config(THINKING, "rollout.engine=vllm", *words), 12e9 / GIB)
        assert found.fits and found.vllm == plan and found.engine.name == "vllm"
        assert found.rollout_gib <= found.machine.usable_gib
        taken = plan.gpu_memory_utilization * found.machine.total_gib
        weights = parts.vllm_weight_bytes(read_workload(run, gpu(12))) / GIB
        resting = found.rollout_gib - taken + (0 if words else weights)
        assert resting == pytest.approx(rollout_gib(replace(read_workload(run, gpu(12)), engine="server"), 1), abs=0.01)


def test_the_pool_holds_the_rows_and_no_more_fit() -> None:
    """All completions of a step go to vLLM, as many at once as the pool holds; a share that is set is kept."""
    run = load_config(THINKING, "rollout.engine=vllm")
    for gb, rows in ((12, 8), (80, 32)):
        plan, work = plan_vllm(run, gpu(gb)), read_workload(run, gpu(gb))
        assert plan.obstacle is None and plan.max_num_seqs == rows and work.completions == 32
        assert plan.pool_gib * GIB >= rows * parts.row_bytes(work)
        most = comfortable_gib(work, gpu(gb).usable_gib, "rollout")
        assert rollout_gib(work, rows) <= most and (rows == 32 or rollout_gib(work, rows + 1) > most)
    half = plan_vllm(load_config(THINKING, "rollout.vllm.gpu_memory_utilization=0.6"), gpu(24))
    assert half.gpu_memory_utilization == pytest.approx(0.6)
    small = plan_vllm(load_config(THINKING, "rollout.vllm.float8_kv_cache=true"), gpu(12))
    assert small.max_num_seqs in (15, 16, 17), "half the bytes of a row"
    assert plan_vllm(load_config(THINKING, "rollout.rows=5"), gpu(12)).max_num_seqs == 5


@pytest.mark.parametrize(
    ("words", "machine", "expected"),
    [
        (["model.lora=null", "model.load_in_4bit=false", *IN_16_BIT], gpu(80), "model.lora is null|model.lora={r: 16}"),
        (["rollout.vllm.gpu_memory_utilization=0.3"], gpu(12), "is 0.3, which leaves 0.|4608 tokens takes 0.|=null"),
        (["rollout.vllm.float8_kv_cache=true"], replace(gpu(12), capability=(7, 5)), "8.0|7.5|float8_kv_cache=false"),
        (IN_16_BIT, gpu(11), "GiB|model.load_in_4bit=true|rollout.vllm.float8_kv_cache=true|rollout.engine=auto"),
        ([], HERE, f"not installed|{VLLM_INSTALL}"),
    ],
)
def test_what_keeps_vllm_from_a_run(words: list[str], machine: Machine, expected: str) -> None:
    """Each was an error from inside vLLM, after the weights were loaded."""
    run = load_config(THINKING, *words)
    obstacle = plan_vllm(run, machine).obstacle or ""
    assert not [part for part in expected.split("|") if part not in obstacle], obstacle
    choice = plan_engine(run, machine)
    assert choice.name in ("generate", "native") and obstacle.partition("; set ")[0] in choice.reason


def test_auto_takes_vllm_where_it_is_installed_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says why not where it does not: a run that is three times slower than it need be has no other sign of it."""
    run = load_config(THINKING)
    assert plan_engine(run, HERE).name == "native" and VLLM_INSTALL in plan_engine(run, HERE).reason
    install(monkeypatch, "unsloth")
    assert plan_engine(run, HERE).name == "native"
    other = load_config(THINKING, "model.name=HuggingFaceTB/SmolLM3-3B")
    assert plan_engine(other, HERE).name == "generate", "layers that Unsloth runs through transformers"
    install(monkeypatch, "unsloth", "vllm", version="0.27.1")
    assert plan_engine(run, HERE).name == "vllm" and "8 completions" in plan_engine(run, HERE).reason
    install(monkeypatch, "unsloth", "vllm", version="0.31.0")
    assert "vllm_bnb_plugin" in plan_engine(run, HERE).reason
    install(monkeypatch, "unsloth", "vllm", "vllm_bnb_plugin", version="0.31.0")
    assert plan_engine(run, HERE).name == "vllm"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plan_engine(run, HERE).name == "native" and "2 processes" in plan_engine(run, HERE).reason
    monkeypatch.delenv("WORLD_SIZE")
    cpu = Machine("the CPU", 64, 0.3, False)
    assert plan_engine(run, cpu).name == "native" and "GPU" in plan_engine(run, cpu).reason
    for engine in ("native", "generate", "vllm", "server"):
        words = [f"rollout.engine={engine}", "rollout.server_url=http://node1:8000"][: 2 if engine == "server" else 1]
        assert plan_engine(load_config(THINKING, *words), cpu).name == engine


def test_training_that_needs_the_gpu_for_itself_keeps_vllm_out() -> None:
    """Asleep it still holds a gigabyte: a run whose training just fits must not be moved over the limit by auto."""
    run = load_config(THINKING, "rloo.tokens_per_pass=40000")
    alone = training_gib(read_workload(run, gpu(12)))
    machine = replace(gpu(12), total_gib=alone + 0.8 + 0.1)
    obstacle = plan_vllm(run, machine).obstacle or ""
    assert "while vLLM sleeps" in obstacle and "rollout.vllm.enforce_eager=true" in obstacle
    assert plan_engine(run, machine).name == "native"


def test_only_what_helps_is_named() -> None:
    """A share without room for the cache got figures that fit, and `rloo.memory=low`."""
    run = load_config(THINKING, "rollout.vllm.gpu_memory_utilization=0.3")
    for capability in ((8, 6), (7, 5)):
        obstacle = plan_vllm(run, replace(gpu(12), capability=capability)).obstacle or ""
        named = [key for key in ("float8_kv_cache", "memory=low", "enforce_eager", "engine=auto") if key in obstacle]
        assert named == ["float8_kv_cache"] * (capability >= (8, 0)), obstacle


def test_on_a_cpu_vllm_never_sleeps() -> None:
    """Its pool and weights were left out of training, and CUDA graphs were counted."""
    work = work_of(PUBLISHED["4b"], fused=False, engine="vllm", on_cuda=False)
    own = [part for part in parts.list_parts(work, 8) if part.name.startswith("vLLM: ")]
    assert len(own) == 3 and all(part.training_gib == part.rollout_gib > 0 for part in own)
    assert parts.buffer_bytes(work, 8) == parts.buffer_bytes(replace(work, enforce_eager=True), 8)


def test_the_plan_says_which_engine_it_is_for() -> None:
    """`rollout.engine=vllm` got the plan of `generate`: a cache and its copies that vLLM never makes."""
    plans = {}
    for engine in ("auto", "vllm", "generate"):
        plans[engine] = plan_vram(load_config(THINKING, f"rollout.engine={engine}"), 12e9 / GIB)
        assert f"Rollouts: {plans[engine].engine.name} (" in str(plans[engine])
    names = {engine: {part.name for part in plan.parts} for engine, plan in plans.items()}
    assert {"graphs", "decoder"} <= names["auto"] and "decoding" in names["generate"] and "vLLM: pool" in names["vllm"]
    assert "decoding" not in names["vllm"] | names["auto"] and "graphs" not in names["generate"] | names["vllm"]
    assert str(plans["vllm"].vllm) in " ".join(str(plans["vllm"]).split())
    # `plan` exited with 0 for a run that `train` refuses
    plan = plan_vram(load_config(THINKING, "rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.15"), 24)
    assert plan.headroom_gib > 0 and not plan.fits
    assert "Cannot run" in str(plan) and "rollout.vllm.gpu_memory_utilization is 0.15" in " ".join(str(plan).split())

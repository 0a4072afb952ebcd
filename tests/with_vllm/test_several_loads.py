"""vLLM in the process, started more than once, and what its start leaves of the process. A separate process each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGINNING = """
import gc, random, sys
import numpy, psutil, torch
import rloo_kit as kit

kit.setup_environment()
words = ["run.output_dir={folder}", "model.max_seq_length=512", "run.evaluate=false", "run.sample_every_steps=0"]
def read(engine, *more):
    return kit.load_config("{config}", f"rollout.engine={{engine}}", *words, *more)
def sample(policy, **named):
    return [c.ids for c in kit.generate_completions(policy, prompts, limits=30, **named)]
prompts = list(kit.load_data(read("native"), kit.load_policy(read("native")).tokenizer).test["prompt"][:4])
"""


def run_script(script: str, folder: Path) -> str:
    config = ROOT / "configs" / "arithmetic_thinking.yaml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING.format(folder=folder, config=config) + script],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_second_load_takes_the_place_of_the_first(tmp_path, vllm_is_here):
    """The first one's gigabyte stayed; collected after all, it took the process groups of the second along."""
    script = """
def memory():
    return psutil.Process().memory_info().rss / 2**30
first = kit.load_policy(read("vllm"))
texts, one = sample(first), memory()
second = kit.load_policy(read("vllm"))
assert sample(second) == texts and sample(first, engine="auto") and sample(second) == texts
first = None
gc.collect()
assert sample(second) == texts
assert memory() < one + 0.5, (one, memory())
third = kit.load_policy(read("vllm"))
second = None
gc.collect()
assert sample(third) == texts
assert memory() < one + 0.5, (one, memory())
"""
    run_script(script, tmp_path)


def test_a_policy_that_was_loaded_without_it_gets_it_as_the_run_says(tmp_path, vllm_is_here):
    """vLLM's start took random numbers and `set_num_threads` away, and overlooked `rollout.vllm`."""
    script = """
from rloo_kit.models.backends import find_vllm
from rloo_kit.models.policy import start_engine
policy = kit.load_policy(read("native"))
def draw():
    random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
    between()
    return random.random(), numpy.random.rand(), torch.rand(1).item()
settings = "rollout.rows=3", "rloo.max_steps=2"
before, between = (torch.set_num_threads, sys.excepthook), lambda: None
drawn, between = draw(), lambda: start_engine(read("vllm", *settings), policy)
assert drawn == draw()
assert before == (torch.set_num_threads, sys.excepthook) and gc.get_freeze_count() == 0
for engine in ("vllm", "native"):
    run = read(engine, f"run.name={engine}", *settings)
    data = kit.load_data(run, policy.tokenizer)
    policy.trained.clear()  # a run refuses one that is trained; here any weights will do
    kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
vllm = find_vllm(policy.model)
assert (vllm.max_num_seqs, vllm.max_tokens) == (3, 512), vllm
"""
    assert "launch" not in run_script(script, tmp_path)

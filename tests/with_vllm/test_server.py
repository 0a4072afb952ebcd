"""The engine "server" against vLLM's own server: log-probabilities, adapters, budgets, refusals, whole runs.

`tests/rollout/test_server.py` has the same engine against a stand-in, where every request can be looked at.
"""

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.episodes import Echo
from tests.rollout.models import check_logps
from tests.with_vllm.conftest import VllmServer

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "arithmetic_thinking.yaml"
GAP = 1e-3  # nats, of every token, in float32
BLOCK = 128  # tokens of a block of vLLM's prefix cache on a CPU
KEY = "sk-a-key-that-nobody-may-read"
STEPS, WINDOW = 25, 5
# The demo's bar for a rise in accuracy holds after 50 steps; here it is the reward's.
LEAST_RISE = 0.30


@pytest.fixture(scope="module")
def tokenizer(embedded_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Four sums, each three times, as the run asks them; and one that fills several blocks of the prefix cache."""
    sums = ["47+385=", "1+1=", "998+999=", "60+7=", "+".join(["123"] * (2 * BLOCK // 4 + 10)) + "="]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in sums
    ]
    found = [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for _ in range(3)]
    assert len(found[-1]) > 2 * BLOCK
    return found


@pytest.fixture(scope="module")
def make_policy(embedded_folder: Path) -> Callable[..., Any]:
    """`make_policy(seed=1, **lora)`: the embedded model with an adapter that is not the identity."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.rollout.models import MODULES, shake

    def build(seed: int = 1, **lora: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype="float32")
        options = {"r": 8, "lora_alpha": 8, "target_modules": MODULES, "task_type": "CAUSAL_LM"} | lora
        model = get_peft_model(base, LoraConfig(**options)).eval()
        shake(model, seed, scale=0.1)
        return model

    return build


@pytest.fixture
def make_engine(tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """`make_engine(server, model, temperature=1.0, **more)`: the engine of that policy; `engine.said` has its lines."""
    from rloo_kit.rollout.engine import Sampling
    from rloo_kit.vllm.engines import ServerEngine, ServerSettings

    def build(server: VllmServer, model: Any, temperature: float = 1.0, **more: Any) -> Any:
        said: list[str] = []
        settings = ServerSettings(server.url, tmp_path / "adapters", lambda folder: model.save_pretrained(folder), 320)
        sampling = Sampling(temperature, (tokenizer.eos_token_id,), say=said.append, **more)
        engine = ServerEngine(settings, "a test", sampling)
        engine.said = said
        return engine

    return build


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_every_token_is_scored_as_the_trainer_scores_it(
    server, make_policy, make_engine, prompts, tokenizer, temperature
):
    """The weights of a step are made of this gap; above temperature 1 the probe asked for one that vLLM refuses."""
    from rloo_kit.rollout.thinking_budget import make_limits
    from rloo_kit.think_tags import bind_think_tags

    model, limits = make_policy(), make_limits(tokenizer, bind_think_tags(tokenizer), 160, 6, 20, close="sentence")
    engine = make_engine(server, model, temperature)
    found = engine.sample(prompts, limits)
    check_logps(model, prompts, found, temperature, GAP)
    assert any(found.forced), "a request follows what was forced"
    assert len({tuple(ids) for ids in found.completion_ids}) > len(prompts) / 2, "siblings are to differ"
    if temperature != 1.0:
        with pytest.raises(AssertionError):  # the temperature shows in the log-probabilities
            check_logps(model, prompts, found, 1.0, 0.1)
    engine.close()


def test_turns_continue_behind_their_replies(server, make_policy, make_engine, prompts):
    """Each turn is a request of its own, behind the tool's result, which has no log-probability."""
    from rloo_kit.rollout.types import Limits

    model = make_policy()
    engine = make_engine(server, model)
    found = engine.sample(prompts, Limits(60), dialogue=Echo(lambda number: 0.02 * (number % 3)))
    check_logps(model, prompts, found, tolerance=GAP)
    assert max(map(len, found.context)) == 2
    for number, (ids, context) in enumerate(zip(found.completion_ids, found.context, strict=True)):
        assert [ids[start] for start, _ in context] == [30 + number % 8] * len(context)
    engine.close()


def test_accepted_filters_are_in_the_log_probabilities(server, make_policy, make_engine, prompts):
    """What a filter leaves is renormalised, or a step's weights would not be the shares that were kept."""
    from rloo_kit.rollout.types import Limits
    from tests.rollout.models import FILTERS, check_kept

    model = make_policy()
    for filters in FILTERS.values():
        engine = make_engine(server, model, 1.2, filters=filters)
        check_kept(model, prompts[::2], engine.sample(prompts[::2], Limits(16)), filters, 1.2)
        engine.close()


def count(server: VllmServer, name: str) -> float:
    """One of vLLM's counters."""
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", lines, flags=re.M))


def test_a_replaced_adapter_meets_no_stale_prefix(server, make_policy, make_engine, prompts):
    """The last adapter's cache gives plausible tokens with wrong log-probabilities; these prompts are cached."""
    from rloo_kit.rollout.types import Limits
    from tests.rollout.models import shake

    model, long = make_policy(), prompts[-3:]
    engine = make_engine(server, model)
    last = None
    for seed in (1, 2, 3):
        shake(model, seed, scale=0.1)
        before = count(server, "prefix_cache_hits_total")
        for _ in range(2):  # the second time all of it is cached
            found = engine.sample(long, Limits(16))
            check_logps(model, long, found, tolerance=GAP)
        assert count(server, "prefix_cache_hits_total") - before >= 3 * BLOCK
        if last is not None:
            with pytest.raises(AssertionError):  # else the adapters are too alike to tell them apart
                check_logps(last, long, found, tolerance=0.1)
        last = copy.deepcopy(model)
    engine.close()


def test_a_rollout_that_is_interrupted_leaves_nothing_in_flight(server, make_policy, make_engine, prompts):
    """vLLM's engine ends when a request in flight needs a deleted adapter: a Ctrl-C ended the server for everybody."""
    from rloo_kit.rollout.types import Limits

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    engine = make_engine(server, make_policy(1))
    with pytest.raises(KeyboardInterrupt):
        engine.sample(prompts * 8, Limits(180), on_progress=interrupt)
    engine.close()
    model = make_policy(2)
    engine = make_engine(server, model)
    check_logps(model, prompts, engine.sample(prompts, Limits(16)), tolerance=GAP)
    engine.close()
    deadline = time.monotonic() + 30
    while (running := count(server, "num_requests_running")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running and server.is_running()


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def strict_server(make_server: Callable[..., VllmServer]) -> VllmServer:
    """A server with little room: rank 8, 160 tokens, a key, log-probabilities from before the temperature."""
    return make_server(rank=8, context=160, variables={"VLLM_API_KEY": KEY}).start()


def test_refusals_name_the_switch(strict_server, make_policy, make_engine, prompts, monkeypatch):
    """vLLM's words are known from its answers here, not from its sources."""
    from rloo_kit.errors import RolloutServerError
    from rloo_kit.rollout.types import Limits
    from rloo_kit.vllm.client import VllmClient

    monkeypatch.setenv("VLLM_API_KEY", KEY)
    short = prompts[:2]
    longest = max(map(len, short)) + 200
    for lora, temperature, room, message in (
        ({"r": 16}, 1.0, 8, "its rank is 16.*--max-lora-rank 16"),
        ({}, 1.0, 200, f"a completion of 200 exceed the 160 of {strict_server.url}.*--max-model-len {longest}"),
        ({}, 1.2, 8, r"rloo.temperature is 1\.2.*--logprobs-mode processed_logprobs"),
    ):
        with pytest.raises(RolloutServerError, match=f"(?s){message}"):
            make_engine(strict_server, make_policy(**lora), temperature).sample(short, Limits(room))
    # two machines, each with its own /outputs
    with pytest.raises(RolloutServerError, match="does not see /not/mounted/here: set rollout.server_adapters"):
        VllmClient(strict_server.url).load_adapter("rloo-missing", "/not/mounted/here", 8)
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(RolloutServerError, match="asks for a key: set VLLM_API_KEY"):
        make_engine(strict_server, make_policy()).sample(short, Limits(8))


# ------------------------------------------------------------------------------------------------------- whole runs


class Run:
    """`rloo-kit train` on the embedded model in a separate process, which may be looked at while it goes on."""

    def __init__(self, folder: Path, name: str, *words: str, steps: int, **variables: str) -> None:
        self.folder = folder / "outputs" / name
        self.printed = folder / f"{name}.log"
        command = [
            sys.executable, "-m", "rloo_kit.cli", "train", str(CONFIG), f"run.output_dir={folder / 'outputs'}",
            f"run.name={name}", "run.evaluate=false", "run.report=false", "run.sample_every_steps=1",
            f"rloo.max_steps={steps}", "rloo.lr_scheduler_type=constant", *words,
        ]  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        environment = inherited | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables
        with self.printed.open("wb") as out:
            self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=subprocess.STDOUT)

    def steps(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [row for row in map(json.loads, lines) if "reward" in row]

    def until(self, what: Callable[[], bool], within_s: float = 240.0) -> None:
        deadline = time.monotonic() + within_s
        while not what():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.05)

    def end(self, within_s: float = 400.0) -> "Run":
        try:
            code = self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert code == 0, self.text[-4000:]
        return self

    @property
    def text(self) -> str:
        return self.printed.read_text(errors="replace")


def on_server(server: VllmServer) -> list[str]:
    return ["rollout.engine=server", f"rollout.server_url={server.url}"]


def check_gaps(run: Run, steps: int) -> None:
    """Every token of every step was sampled from the weights of that step."""
    gaps = [row["sampling/logp_difference_max"] for row in run.steps()]
    assert len(gaps) == steps and max(gaps) < GAP, gaps


def test_it_learns(server, tmp_path):
    """The proof of the whole path: an adapter that arrives a step late, or not at all, does not learn."""
    run = Run(tmp_path, "server", *on_server(server), "rloo.per_device_train_batch_size=64", steps=STEPS).end()
    check_gaps(run, STEPS)
    found = [row["reward"] for row in run.steps()]
    assert sum(found[-WINDOW:]) / WINDOW - sum(found[:2]) / 2 > LEAST_RISE, found
    assert not list((run.folder / "server_adapters").glob("*")), "nothing is left"


@pytest.mark.long
def test_a_server_that_is_killed_in_mid_run(strict_server, tmp_path):
    """Its engine dies under completions: the run ends saved and resumes, and the key is in none of its files."""
    steps, options = 8, {"VLLM_API_KEY": KEY}
    words = [*on_server(strict_server), "model.lora.r=8", "rloo.save_steps=100"]
    run = Run(tmp_path, "killed", *words, steps=steps, **options)
    run.until(lambda: len(run.steps()) >= 2)
    run.until(lambda: count(strict_server, "num_requests_running") > 0)
    strict_server.engine_process().kill()
    assert run.process.wait(timeout=300) == 2 and "--resume" in run.text, run.text[-4000:]
    assert 2 <= max(int(path.name.split("-")[1]) for path in run.folder.glob("checkpoints/checkpoint-*")) < steps
    printed = run.printed.read_bytes()
    strict_server.stop()
    strict_server.start()
    run = Run(tmp_path, "killed", *words, "--resume", steps=steps, **options).end()
    check_gaps(run, steps)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in [*files, run.printed, strict_server.log]:
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY.encode() not in printed

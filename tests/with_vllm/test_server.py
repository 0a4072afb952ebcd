"""The engine "server" against vLLM's own server: log-probabilities, adapters, budgets, refusals, whole runs.

`tests/rollout/test_server.py` has the same engine against a stand-in, where every request can be looked at.
"""

import copy
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rloo_kit.runs.rollouts import read_rollouts
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
    from rloo_kit.rollout.server import ServerEngine, ServerSettings
    from rloo_kit.rollout.types import Sampling

    def build(server: VllmServer, model: Any, temperature: float = 1.0, **more: Any) -> Any:
        said: list[str] = []
        settings = ServerSettings(
            server.url, tmp_path / "adapters", lambda folder: model.save_pretrained(folder), str(tmp_path), 320
        )
        sampling = Sampling(temperature, (tokenizer.eos_token_id,), say=said.append, **more)
        engine = ServerEngine(settings, "a test", sampling)
        engine.said = said
        return engine

    return build


def largest_gap(model: Any, prompts: list[list[int]], found: Any, temperature: float = 1.0) -> float:
    """The largest distance, in nats, between a token's log-probability at the server and in `model`."""
    from tests.rollout.models import teacher_forced

    gaps = [0.0]
    for prompt, ids, span, logps in zip(prompts, found.completion_ids, found.forced, found.sampler_logps, strict=True):
        exact = teacher_forced(model, prompt, ids, temperature)
        for number, (one, other) in enumerate(zip(logps, exact, strict=True)):
            is_forced = span is not None and span[0] <= number < span[1]
            assert math.isnan(one) == is_forced
            gaps += [] if is_forced else [abs(one - other)]
    return max(gaps)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.2, 2.0])
def test_every_token_is_scored_as_the_trainer_scores_it(server, make_policy, make_engine, prompts, temperature):
    """The importance weights of a step are made of this gap. Above 1 the probe of the log-probabilities asked for a
    temperature that vLLM does not take, and no run started."""
    from rloo_kit.rollout.types import Limits

    model = make_policy()
    engine = make_engine(server, model, temperature)
    found = engine.sample(prompts, Limits(48))
    assert largest_gap(model, prompts, found, temperature) < GAP
    assert len({tuple(ids) for ids in found.completion_ids}) > len(prompts) / 2, "siblings are to differ"
    if temperature != 1.0:
        assert largest_gap(model, prompts, found, 1.0) > 0.1, "the temperature shows in the log-probabilities"
    engine.close()


def test_accepted_filters_are_in_the_log_probabilities(server, make_policy, make_engine, prompts):
    """With a server `accept_truncated_sampling` was refused. What a filter leaves is renormalised, as in the kit's own
    engines; else the weights of a step would not be the shares that were kept."""
    from rloo_kit.rollout.types import Limits
    from tests.rollout.models import FILTERS, check_kept

    model = make_policy()
    together = replace(FILTERS["all"], min_p=0.0)  # which vLLM applies first
    for filters in (FILTERS | {"all": together}).values():
        engine = make_engine(server, model, 1.2, filters=filters)
        check_kept(model, prompts, engine.sample(prompts, Limits(32)), filters, 1.2)
        engine.close()


def count(server: VllmServer, name: str) -> float:
    """One of vLLM's counters."""
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", lines, flags=re.M))


def cached_tokens(server: VllmServer) -> float:
    """Tokens that vLLM took from its prefix cache so far."""
    return count(server, "prefix_cache_hits_total")


def generated_tokens(server: VllmServer) -> float:
    return count(server, "generation_tokens_total")


def test_a_replaced_adapter_meets_no_stale_prefix(server, make_policy, make_engine, prompts):
    """Keys and values of a prompt depend on the adapter. Taken from the last adapter's cache they give plausible tokens
    with wrong log-probabilities. The prompts are longer than a block, so they are cached, and the cache is used."""
    from rloo_kit.rollout.types import Limits
    from tests.rollout.models import shake

    model, long = make_policy(), prompts[-3:]
    engine = make_engine(server, model)
    last = None
    for seed in (1, 2, 3):
        shake(model, seed, scale=0.1)
        before = cached_tokens(server)
        for _ in range(2):  # the second time all of it is cached
            found = engine.sample(long, Limits(16))
            assert largest_gap(model, long, found) < GAP
        assert cached_tokens(server) - before >= 3 * BLOCK
        if last is not None:
            assert largest_gap(last, long, found) > 0.1, "the adapters are too alike to tell them apart"
        last = copy.deepcopy(model)
    engine.close()


def test_a_rollout_that_is_interrupted_leaves_nothing_in_flight(server, make_policy, make_engine, prompts):
    """vLLM's engine ends, for everybody, when it needs the adapter of a request in flight that was replaced meanwhile
    and whose folder is deleted: a Ctrl-C in a notebook ended the server."""
    from rloo_kit.rollout.types import Limits

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    engine = make_engine(server, make_policy(1))
    with pytest.raises(KeyboardInterrupt):
        engine.sample(prompts * 8, Limits(180), on_progress=interrupt)
    engine.close()
    model = make_policy(2)
    engine = make_engine(server, model)
    assert largest_gap(model, prompts, engine.sample(prompts, Limits(16))) < GAP
    engine.close()
    deadline = time.monotonic() + 30
    while (running := count(server, "num_requests_running")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running and server.is_running()


@pytest.mark.parametrize("close", ["tag", "sentence"])
def test_budgets(server, make_policy, make_engine, prompts, tokenizer, close):
    """vLLM's own thinking budget marks nothing as forced, and lets the model close its thinking twice."""
    from rloo_kit.rollout.thinking_budget import make_limits
    from rloo_kit.think_tags import bind_think_tags

    model, tags = make_policy(), bind_think_tags(tokenizer)
    limits = make_limits(tokenizer, tags, 160, 6, 4, close=close)
    found = make_engine(server, model).sample(prompts, limits)
    assert largest_gap(model, prompts, found) < GAP
    kinds = set()
    for ids, span in zip(found.completion_ids, found.forced, strict=True):
        if span is not None:
            kinds.add("forced")
            assert span == (6, 6 + len(limits.close_ids)) and tuple(ids[slice(*span)]) == limits.close_ids
            assert 1 <= len(ids) - span[1] <= 4
        elif tags.end_id in ids:
            kinds.add("closed")
            assert ids.index(tags.end_id) < 6 and len(ids) - ids.index(tags.end_id) - 1 <= 4
    assert "forced" in kinds


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def strict_server(make_server: Callable[..., VllmServer]) -> VllmServer:
    """A server with little room: rank 8, 160 tokens, a key, log-probabilities from before the temperature."""
    return make_server(rank=8, context=160, variables={"VLLM_API_KEY": KEY}).start()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def refusal(engine: Any, prompts: list[list[int]], room: int = 8) -> str:
    from rloo_kit.errors import RolloutServerError
    from rloo_kit.rollout.types import Limits

    with pytest.raises(RolloutServerError) as error:
        engine.sample(prompts, Limits(room))
    assert KEY not in str(error.value)
    return str(error.value)


def test_refusals_name_the_switch(strict_server, make_policy, make_engine, prompts, key):
    """vLLM's words are known from its answers here, not from its sources."""
    short = prompts[:2]
    found = {
        "rank": refusal(make_engine(strict_server, make_policy(r=16)), short),
        "DoRA": refusal(make_engine(strict_server, make_policy(use_dora=True)), short),
        "context": refusal(make_engine(strict_server, make_policy()), short, room=200),
        "mode": refusal(make_engine(strict_server, make_policy(), temperature=1.2), short),
    }
    assert "its rank is 16" in found["rank"] and "--max-lora-rank 16" in found["rank"]
    assert "vLLM does not yet support DoRA" in found["DoRA"] and "use_dora=False" in found["DoRA"]
    longest = max(map(len, short))
    assert f"a completion of 200 exceed the 160 of {strict_server.url}" in found["context"]
    assert f"--max-model-len {longest + 200}" in found["context"]
    assert "rloo.temperature is 1.2" in found["mode"] and "--logprobs-mode processed_logprobs" in found["mode"]


def test_a_folder_that_the_server_does_not_see(strict_server, key):
    """The usual mistake with two machines: each has its own /outputs."""
    from rloo_kit.errors import RolloutServerError
    from rloo_kit.rollout.vllm_client import VllmClient

    with pytest.raises(RolloutServerError, match="does not see /not/mounted/here: set rollout.server_adapters"):
        VllmClient(strict_server.url).load_adapter("rloo-missing", "/not/mounted/here", 8)


def test_without_the_key(strict_server, make_policy, make_engine, prompts, monkeypatch):
    """The status alone says nothing of the variable."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert "asks for a key: set VLLM_API_KEY" in refusal(make_engine(strict_server, make_policy()), prompts[:1])


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


def rewards_of(run: Run) -> list[float]:
    return [row["reward"] for row in run.steps()]


def check_gaps(run: Run, steps: int) -> None:
    """Every token of every step was sampled from the weights of that step."""
    gaps = [row["sampling/logp_difference_max"] for row in run.steps()]
    assert len(gaps) == steps and max(gaps) < GAP, gaps


@pytest.fixture(scope="module")
def learned(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same run by `native` and through the server."""
    folder, small = tmp_path_factory.mktemp("learned"), "rloo.per_device_train_batch_size=64"
    native = Run(folder, "native", "rollout.engine=native", small, steps=STEPS).end()
    return native, Run(folder, "server", *on_server(server), small, steps=STEPS).end()


def test_learns_as_native_does(learned):
    """The proof of the whole path: an adapter that arrives a step late, or not at all, does not learn."""
    native, ours = learned
    check_gaps(ours, STEPS)
    rises = []
    for run in (native, ours):
        found = rewards_of(run)
        rises.append(sum(found[-WINDOW:]) / WINDOW - sum(found[:2]) / 2)
    assert min(rises) > LEAST_RISE and abs(rises[0] - rises[1]) < 0.5 * max(rises), rises
    assert not list((ours.folder / "server_adapters").glob("*")), "nothing is left"


def evaluate(folder: Path, *words: str) -> dict[str, Any]:
    """What `rloo-kit eval ... --json` finds on 100 held-out prompts, greedily."""
    command = [sys.executable, "-m", "rloo_kit.cli", "eval", str(CONFIG), "eval.num_prompts=100", "eval.temperature=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *words, "--json"], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_eval_samples_on_the_server(server, learned, tmp_path):
    """`eval` sampled in its own process whatever the run said, through another engine than training. Greedy
    answers of one adapter are the same."""
    adapter = ["--adapter", str(learned[1].folder / "adapter")]
    native = evaluate(tmp_path, "rollout.engine=native", *adapter)
    before = generated_tokens(server)
    ours = evaluate(tmp_path, *on_server(server), *adapter)
    assert generated_tokens(server) - before > 100
    accuracies = [one["measures"]["accuracy"]["value"] for one in (ours, native)]
    assert ours["num_prompts"] == 100 and accuracies[0] == pytest.approx(accuracies[1], abs=0.02)
    assert ours["mean_tokens"] == pytest.approx(native["mean_tokens"], rel=0.02)


@pytest.mark.long
def test_two_processes(server, tmp_path):
    """Each process sends its own prompts; the adapter is loaded once, and both sample from it."""
    launch = ["--launch", str(ROOT / "configs" / "accelerate" / "cpu_two.yaml")]
    words = [*on_server(server), "rloo.per_device_train_batch_size=32"]
    run = Run(tmp_path, "two", *words, *launch, steps=3).end()
    check_gaps(run, 3)
    assert "TRL currently supports vLLM versions" not in run.text, "TRL's own path, which no run takes"
    rows = list(read_rollouts(run.folder))
    assert len(rows) == 3 * 2 * 32 and len({row["prompt"] for row in rows}) == 3 * 2 * 32 / 8


def await_requests(server: VllmServer, run: Run) -> None:
    """Return when the server is sampling."""
    running = re.compile(r"^vllm:num_requests_running\{.*\} [1-9]", flags=re.M)
    run.until(lambda: running.search(httpx.get(f"{server.url}/metrics", trust_env=False).text) is not None)


@pytest.mark.long
def test_a_server_that_is_killed_in_mid_run(strict_server, tmp_path):
    """vLLM's engine dies under completions, which are answered with status 500 and ended the run; later the server is
    shut down, which answers them never. Both times the run waits for the server, hands the adapter over again and goes
    on. The key that opens the server is in no file of the run."""
    steps = 8
    run = Run(tmp_path, "killed", *on_server(strict_server), "model.lora.r=8", steps=steps, VLLM_API_KEY=KEY)
    run.until(lambda: len(run.steps()) >= 2)
    await_requests(strict_server, run)
    strict_server.engine_process().kill()
    run.until(lambda: not strict_server.is_running())
    strict_server.stop()
    strict_server.start()
    run.until(lambda: len(run.steps()) >= 4)
    await_requests(strict_server, run)
    strict_server.terminate()
    run.until(lambda: not strict_server.listens())
    done, lost = len(run.steps()), run.text.count("loading it again")
    assert lost >= 1 and done < steps
    ended = strict_server.detach()
    try:
        strict_server.start()
        run.end()
    finally:
        ended.stop()
    assert run.text.count("loading it again") > lost
    check_gaps(run, steps)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in [*files, run.printed, strict_server.log]:
        assert KEY.encode() not in path.read_bytes(), path

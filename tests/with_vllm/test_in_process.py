"""vLLM in the trainer's process: the adapter in memory, its probabilities, budgets, learning, what is refused.

One vLLM serves all tests of the file. Its model is the embedded one in float32.
"""

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.episodes import Echo
from tests.rollout.models import MODULES, check_logps

ROOT = Path(__file__).resolve().parents[2]
THINKING = ROOT / "configs" / "arithmetic_thinking.yaml"
MOST = 1e-3  # nats between vLLM's and the trainer's log-probability of a token, in float32
LONG = 300  # tokens of a prompt that fills two blocks of vLLM's cache, 128 tokens each on a CPU


@pytest.fixture(scope="module")
def run(vllm_is_here: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import rloo_kit as kit

    kit.setup_environment()
    folder = tmp_path_factory.mktemp("runs")
    words = ["rollout.engine=vllm", f"run.output_dir={folder}", "model.lora.alpha=32", "model.max_seq_length=512"]
    words += ["eval.num_prompts=64"]  # some are right: 12 % are, and of 16 prompts none may be
    return kit.load_config(THINKING, *words)


@pytest.fixture(scope="module")
def policy(run: Any) -> Any:
    import rloo_kit as kit

    return kit.load_policy(run)


@pytest.fixture(scope="module")
def data(run: Any, policy: Any) -> Any:
    import rloo_kit as kit

    return kit.load_data(run, policy.tokenizer)


@pytest.fixture(autouse=True)
def start_again(policy: Any) -> Iterator[None]:
    """Each test starts from the adapter that the policy was loaded with."""
    start = {name: value.detach().clone() for name, value in policy.model.named_parameters() if value.requires_grad}
    yield
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if name in start:
                value.copy_(start[name])


def disturb(model: Any, seed: int) -> None:
    """Another adapter, far from the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.05 * torch.randn(value.shape, generator=generator))


def make_engine(policy: Any, temperature: float = 1.0, model: Any = None, **options: Any) -> Any:
    from rloo_kit.models.backends import find_vllm
    from rloo_kit.rollout.completions import find_end_ids
    from rloo_kit.rollout.engine import Sampling
    from rloo_kit.vllm.engines import VllmEngine

    vllm = find_vllm(policy.model)
    sampling = Sampling(temperature, tuple(find_end_ids(policy)), **options)
    return VllmEngine(model or policy.model, vllm, sampling)


def prompts_of(policy: Any, data: Any, count: int = 4, each: int = 4) -> list[list[int]]:
    ids = policy.tokenizer(list(data.train["prompt"][:count]))["input_ids"]
    return [row for row in ids for _ in range(each)]


def limits(policy: Any, length: int = 40, **budgets: Any) -> Any:
    from rloo_kit.rollout.thinking_budget import make_limits

    return make_limits(policy.tokenizer, policy.tags, length, **budgets)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_every_token_is_as_likely_as_the_trainer_says(temperature, policy, data):
    """Log-probabilities before the temperature, or of the base without the adapter, look plausible and are wrong."""
    disturb(policy.model, 1)
    before = {name: value.clone() for name, value in policy.model.named_parameters()}
    prompts = prompts_of(policy, data)
    sampled = make_engine(policy, temperature).sample(prompts, limits(policy))
    check_logps(policy.model, prompts, sampled, temperature, MOST)
    changed = [name for name, value in policy.model.named_parameters() if not torch.equal(before[name], value)]
    assert not changed, "vLLM scales one matrix of each pair in place: it has to get copies"


def test_a_new_adapter_never_meets_the_old_ones_prefix(policy):
    """A name that is used again finds the keys and values of the adapter before; a resumed run draws the same."""
    prompts = [[(7 * place) % 10 + 15 for place in range(LONG)]] * 4
    engine = make_engine(policy)
    seen = []
    for adapter, seed in ((1, 0), (2, 0), (1, 0), (1, 1)):
        disturb(policy.model, adapter)
        torch.manual_seed(seed)
        sampled = engine.sample(prompts, limits(policy))
        check_logps(policy.model, prompts, sampled, tolerance=MOST)
        seen.append(sampled.completion_ids)
    assert seen[0] != seen[1], "the adapter changes what is sampled"
    assert seen[0] == seen[2] != seen[3], "and nothing else does but the seed"
    assert len({tuple(ids) for ids in seen[0]}) > 1, "each completion has its own seed"


def test_budgets_close_the_thinking_and_bound_the_answer(policy, data):
    """vLLM refused a thinking budget, and every thinking configuration has one."""
    prompts = prompts_of(policy, data)
    sampled = make_engine(policy).sample(prompts, limits(policy, 40, thinking_budget=6, answer_budget=5))
    assert set(map(bool, sampled.forced)) == {True, False}
    for ids, spans, logps in zip(sampled.completion_ids, sampled.forced, sampled.sampler_logps, strict=True):
        assert ids.count(policy.tags.end_id) <= 1 or not spans
        assert [math.isnan(logp) for logp in logps] == [bool(spans) and place == 6 for place in range(len(ids))]
        if spans:
            assert spans == [(6, 7)] and ids[6] == policy.tags.end_id and len(ids) <= 12
    check_logps(policy.model, prompts, sampled, tolerance=MOST)


def test_turns_continue_behind_their_replies(policy, data):
    """A second turn is a request behind the tool's result, whether tools are fast or slow."""
    disturb(policy.model, 2)
    prompts = prompts_of(policy, data)
    engine, found = make_engine(policy), []
    for delay_s in (0.0, 0.05):
        torch.manual_seed(1)
        dialogue = Echo(lambda number, delay_s=delay_s: delay_s * (number % 3))
        found.append(engine.sample(prompts, limits(policy, 60, thinking_budget=6, answer_budget=8), dialogue=dialogue))
        check_logps(policy.model, prompts, found[-1], tolerance=MOST)
    for ids, context, forced in zip(found[0].completion_ids, found[0].context, found[0].forced, strict=True):
        assert [ids[start + 1] for start, _ in context] == [31 + turn for turn in range(len(context))]
        assert len(forced) <= len(context) + 1
    assert max(map(len, found[0].context)) == 2


def test_an_error_leaves_no_request_behind(policy, data):
    """Ctrl-C in a rollout once left requests that the next rollout waited for."""
    engine, prompts = make_engine(policy), prompts_of(policy, data)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.sample(prompts, limits(policy), on_progress=stop)
    counts: list[tuple[int, int]] = []
    sampled = engine.sample(prompts, limits(policy), on_progress=lambda done, total: counts.append((done, total)))
    check_logps(policy.model, prompts, sampled, tolerance=MOST)
    assert counts[-1] == (len(prompts), len(prompts)) and counts == sorted(counts)


def test_an_interrupt_in_the_middle_of_a_step_leaves_vllm_whole(policy, data, monkeypatch):
    """After a Ctrl-C in mid-step vLLM answered "State error" to every later rollout: the signal waits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    engine, prompts = make_engine(policy), prompts_of(policy, data)
    runner = engine._vllm.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    execute, seen = runner.execute_model, []

    def interrupted(*given: Any, **named: Any) -> Any:
        done = execute(*given, **named)
        if not seen:
            seen.append(signal.raise_signal(signal.SIGINT))
        return done

    monkeypatch.setattr(runner, "execute_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.sample(prompts, limits(policy))
    assert seen
    sampled = engine.sample(prompts, limits(policy))
    check_logps(policy.model, prompts, sampled, tolerance=MOST)


def test_a_temperature_that_vllm_raises_is_refused(policy):
    """vLLM samples at 0.01 where 0.005 is asked for, and the trainer scores at 0.005."""
    import rloo_kit as kit
    from rloo_kit.errors import ConfigError

    with pytest.raises(ConfigError, match=r"temperature is 0\.005.*0\.01 or higher"):
        kit.generate_completions(policy, ["1+1="], limits=4, temperature=0.005)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"use_rslora": True}, None),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern.*rollout.engine=generate"),
        ({"r": 32}, "vLLM cannot load the adapter.*rank"),
        ({"use_dora": True}, "uses DoRA.*use_dora=False"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*rollout.engine=generate"),
        ({"init_lora_weights": "pissa"}, "initialised by pissa.*init_lora_weights=True"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_adapters_of_other_kinds(settings, refusal, policy, data, embedded_folder):
    """One that vLLM would load as something else is refused; the others are exact."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from rloo_kit.errors import BackendError

    base = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32)
    config = LoraConfig(**{"r": 16, "lora_alpha": 32, "target_modules": MODULES} | settings)
    model = get_peft_model(base, config).eval()
    disturb(model, 3)
    prompts = prompts_of(policy, data)
    engine = make_engine(policy, model=model)
    if refusal is not None:
        with pytest.raises(BackendError, match=refusal):
            engine.sample(prompts, limits(policy))
        return
    check_logps(model, prompts, engine.sample(prompts, limits(policy)), tolerance=MOST)


def test_evaluation_difficulty_and_notebooks_sample_with_it(run, policy, data, monkeypatch):
    """After `fast_inference` the last cells of the notebook failed, and evaluations took the slow engine."""
    import rloo_kit as kit
    from rloo_kit.rollout.generate import GenerateEngine
    from rloo_kit.rollout.native import NativeEngine

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("another engine samples")

    for engine in (NativeEngine, GenerateEngine):
        monkeypatch.setattr(engine, "sample", refuse)
    measured = kit.evaluate(run, policy, data.test)
    assert 0 < measured.value("accuracy") < 1 and "greedy_accuracy" in measured.measures
    prompt = data.test[0]["prompt"]
    texts = {
        kit.generate_completions(policy, [prompt], limits=40, temperature=0, **named)[0].text
        for named in ({}, {"engine": "auto"}, {"engine": "vllm"})
    }
    assert len(texts) == 1


def test_use_vllm_of_trl_is_this_engine(policy, data, tmp_path):
    """Code for TRL's trainer says `use_vllm=True`, which there means the sync that merges."""
    from rloo_kit import RLOOConfig, RLOOTrainer

    args = RLOOConfig(
        output_dir=str(tmp_path), use_vllm=True, max_steps=1, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=32, report_to="none", learning_rate=1e-4,
    )  # fmt: skip

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids) % 3) for ids in completion_ids]

    trainer = RLOOTrainer(policy.model, reward, args, data.train, processing_class=policy.tokenizer)
    assert trainer.rloo.sampler.engine.name == "vllm" and not trainer.use_vllm
    assert not hasattr(trainer, "vllm_generation") and trainer.rloo.settings.sampler_correction == "token"
    trainer.train()
    assert trainer.state.log_history[0]["sampling/logp_difference_max"] < MOST


def test_vllm_is_awake_for_a_rollout_and_no_longer(policy, data, monkeypatch):
    """Training needs the memory. On a CPU vLLM's own sleep does nothing, so it is followed from outside."""
    engine, seen = make_engine(policy), ["sleep"]
    vllm = engine._vllm
    monkeypatch.setattr(vllm, "_sleeps", True)
    monkeypatch.setattr(vllm._llm, "sleep", lambda level: seen.append("sleep"))
    monkeypatch.setattr(vllm._llm, "wake_up", lambda: seen.append("awake"))
    monkeypatch.setattr(vllm.engine, "is_sleeping", lambda: seen[-1] == "sleep")
    engine.sample(prompts_of(policy, data, 1), limits(policy, 4))
    assert seen == ["sleep", "awake", "sleep"]


def test_broken_weights_are_named(policy, data):
    """A NaN came back as token 0. The file's last test: on a CPU the NaN stays in vLLM's pool."""
    from rloo_kit.errors import BackendError

    with torch.no_grad():
        next(value for name, value in policy.model.named_parameters() if "lora_B" in name).fill_(float("nan"))
    with pytest.raises(BackendError, match="NaN.*rloo.learning_rate"):
        make_engine(policy).sample(prompts_of(policy, data), limits(policy))

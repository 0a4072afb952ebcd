"""Questions that vLLM answers: in this process while the text grows, and on a server; the base without its adapter."""

from pathlib import Path
from typing import Any

import pytest

from tests.with_vllm.conftest import VllmServer

ROOT = Path(__file__).resolve().parents[2]
THINKING = ROOT / "configs" / "arithmetic_thinking.yaml"
QUESTION = "47+385="
# The model of the demo mostly answers at once; this one always thinks, in some 20 tokens to stream.
THINKS = ("model.name=embedded/thinking@subtraction", "data.source=embedded/subtraction")
DIFFERENCE = "385-47="


def make_policy(*words: str) -> tuple[Any, Any]:
    import rloo_kit as kit
    from tests.rollout.models import shake

    kit.setup_environment()
    run = kit.load_config(THINKING, "model.max_seq_length=512", *words)
    policy = kit.load_policy(run)
    shake(policy.model, scale=0.1)
    return run, policy


@pytest.fixture(scope="module")
def in_process(vllm_is_here: None) -> tuple[Any, Any]:
    return make_policy("rollout.engine=vllm", *THINKS)


@pytest.mark.parametrize("budget", [None, 6])
def test_vllm_streams_what_it_samples_without_a_listener(in_process: tuple[Any, Any], budget: int | None) -> None:
    """A request that tells of each step is another kind of request: its tokens have to be the same, for a seed, and
    those behind a forced close come from a second one."""
    import rloo_kit as kit
    from rloo_kit.rollout.completions import generate_completions

    run, policy = in_process
    prompt, shown = kit.load_data(run, policy.tokenizer).test[0]["prompt"], list[list[int]]()
    limits = 60 if budget is None else kit.make_budget_limits(policy.tokenizer, policy.tags, 60, budget, 20)
    for temperature in (0.0, 1.0):
        shown.clear()
        options = {"limits": limits, "temperature": temperature, "seed": 3, "engine": run.rollout}
        (plain,) = generate_completions(policy, [prompt], **options)
        (heard,) = generate_completions(policy, [prompt], on_tokens=lambda _, ids: shown.append(list(ids)), **options)
        assert heard.ids == plain.ids and heard.forced == plain.forced
        assert all(heard.ids[: len(ids)] == ids for ids in shown) and len(shown) > 4, "token by token"


def test_vllm_asks_the_base_without_the_adapter(in_process: tuple[Any, Any]) -> None:
    """The adapter is handed over for each call: one that is switched off must not be, and is back afterwards."""
    import rloo_kit as kit

    run, policy = in_process
    same = run.model_copy(update={"rollout": run.rollout.model_copy(update={"engine": "native"})})
    differ = []
    for question in (DIFFERENCE, "902-118=", "614-593="):
        given, own = (kit.ask(one, policy, question, base=True, temperature=0, stream=False) for one in (run, same))
        assert given.base is not None and own.base is not None
        assert (given.thinking, given.answer) == (own.thinking, own.answer)
        assert (given.base.thinking, given.base.answer) == (own.base.thinking, own.base.answer)
        differ.append((given.thinking, given.answer) != (given.base.thinking, given.base.answer))
    assert any(differ)


def test_a_server_answers_for_the_policy_and_its_base(server: VllmServer) -> None:
    """A server is always asked for an adapter; the base's is one that changes nothing."""
    import rloo_kit as kit

    run, policy = make_policy("rollout.engine=server", f"rollout.server_url={server.url}")
    given = kit.ask(run, policy, QUESTION, base=True, temperature=0, stream=False)
    native = run.model_copy(update={"rollout": type(run.rollout)(engine="native")})
    own = kit.ask(native, policy, QUESTION, base=True, temperature=0, stream=False)
    assert given.base is not None and own.base is not None
    assert (given.thinking, given.answer) == (own.thinking, own.answer)
    assert (given.base.thinking, given.base.answer) == (own.base.thinking, own.base.answer)

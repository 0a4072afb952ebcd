"""Questions that vLLM answers: in this process and on a server; the base without its adapter."""

from pathlib import Path
from typing import Any

import pytest

from tests.with_vllm.conftest import VllmServer

ROOT = Path(__file__).resolve().parents[2]
THINKING = ROOT / "configs" / "arithmetic_thinking.yaml"
QUESTION = "47+385="
# The model of the demo mostly answers at once; this one always thinks.
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


def test_vllm_asks_the_base_without_the_adapter(in_process: tuple[Any, Any]) -> None:
    """The adapter is handed over for each call: one that is switched off must not be, and is back afterwards."""
    import rloo_kit as kit

    run, policy = in_process
    same = run.model_copy(update={"rollout": run.rollout.model_copy(update={"engine": "native"})})
    differ = []
    for question in (DIFFERENCE, "902-118=", "614-593="):
        given, own = (kit.ask(one, policy, question, base=True, temperature=0) for one in (run, same))
        assert given.base is not None and own.base is not None
        assert (given.thinking, given.answer) == (own.thinking, own.answer)
        assert (given.base.thinking, given.base.answer) == (own.base.thinking, own.base.answer)
        differ.append((given.thinking, given.answer) != (given.base.thinking, given.base.answer))
    assert any(differ)


def test_a_server_answers_for_the_policy_and_its_base(server: VllmServer) -> None:
    """A server is always asked for an adapter; the base's is one that changes nothing."""
    import rloo_kit as kit

    run, policy = make_policy("rollout.engine=server", f"rollout.server_url={server.url}")
    given = kit.ask(run, policy, QUESTION, base=True, temperature=0)
    native = run.model_copy(update={"rollout": type(run.rollout)(engine="native")})
    own = kit.ask(native, policy, QUESTION, base=True, temperature=0)
    assert given.base is not None and own.base is not None
    assert (given.thinking, given.answer) == (own.thinking, own.answer)
    assert (given.base.thinking, given.base.answer) == (own.base.thinking, own.base.answer)

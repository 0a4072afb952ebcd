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

    run, policy = in_process
    pieces: list[tuple[str, str]] = []
    for temperature in (0.0, 1.0):
        pieces.clear()
        options = {"temperature": temperature, "seed": 3, "budget": budget}
        heard = kit.ask(run, policy, DIFFERENCE, stream=lambda *piece: pieces.append(piece), **options)
        plain = kit.ask(run, policy, DIFFERENCE, stream=False, **options)
        named = ("thinking", "answer", "tokens", "thinking_tokens", "ended", "forced")
        assert all(getattr(heard, name) == getattr(plain, name) for name in named)
        # A stream cannot wait for the last </think>, where the answer begins: a model may go on after a forced one.
        first, _, rest = f"{heard.thinking}</think>{heard.answer}".partition("</think>")
        for part, text in (("thinking", first), ("answer", rest)):
            said = "".join(piece for found, piece in pieces if found == part)
            assert "".join(said.split()) == "".join(text.split()), part
        assert len(pieces) > 4, "token by token"
        assert heard.forced == (budget is not None and heard.thinking_tokens == budget)


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
    pieces: list[tuple[str, str]] = []
    given = kit.ask(run, policy, QUESTION, base=True, temperature=0, stream=lambda *piece: pieces.append(piece))
    native = run.model_copy(update={"rollout": type(run.rollout)(engine="native")})
    own = kit.ask(native, policy, QUESTION, base=True, temperature=0, stream=False)
    assert given.base is not None and own.base is not None
    assert (given.thinking, given.answer) == (own.thinking, own.answer)
    assert (given.base.thinking, given.base.answer) == (own.base.thinking, own.base.answer)
    assert "".join(text for part, text in pieces if part == "thinking") == given.thinking

"""What a server answers is not trusted, and the key goes to the server alone: the client against real sockets."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rloo_kit.errors import RolloutServerError
from rloo_kit.rollout.engine import Sampling
from rloo_kit.vllm.client import VllmClient
from tests.scripted_server import Scripted

KEY = "the-key-of-the-server"
PROMPT, STOPS, SAMPLING = [1, 2], [9], Sampling(1.0, ())
COMPLETION: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [3, 9], "prompt_token_ids": PROMPT, "finish_reason": "stop", "stop_reason": 9,
            "logprobs": {"token_logprobs": [-0.5, -1.0], "top_logprobs": [{"token_id:3": -0.5, "token_id:4": -2.0}]},
        }
    ]
}  # fmt: skip
MODELS: dict[str, Any] = {
    "data": [{"id": "tiny", "root": "org/tiny", "parent": None, "max_model_len": 512}, {"id": "a", "parent": "tiny"}]
}


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.stop()


@pytest.fixture
def client(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> VllmClient:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return VllmClient(scripted.url, say=lambda line: None)


CALLS: dict[str, Callable[[VllmClient], Any]] = {
    "models": lambda client: client.read_served(),
    "load": lambda client: client.load_adapter("name", "/folder", 8),
    "unload": lambda client: client.unload_adapter("name"),
    "complete": lambda client: client.complete("name", PROMPT, 4, STOPS, 7, SAMPLING),
    "mode": lambda client: client.find_logprobs_mode("name", PROMPT, 0.7),
}


def test_no_redirect_is_followed(scripted, client):
    """The key would go to whatever address the first server names."""
    other = Scripted()
    scripted.answer = lambda path: (307, {"Location": other.url + path}, b"")
    for call in CALLS.values():
        with pytest.raises(RolloutServerError, match="307"):
            call(client)
    other.stop()
    assert not other.headers
    assert scripted.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [f"{KEY}\nsecond-line", f" {KEY}", f"{KEY}\x07", f"{KEY}ü"])
def test_a_key_that_no_header_can_hold_is_refused_without_printing_it(scripted, monkeypatch, key):
    """The HTTP client's own error reads: Illegal header value b'Bearer ...', the key and all."""
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(RolloutServerError, match="VLLM_API_KEY") as caught:
        VllmClient(scripted.url, say=lambda line: None).read_served()
    assert KEY not in str(caught.value)
    assert not scripted.headers


@pytest.mark.parametrize("status", [400, 401, 404, 503])
def test_the_key_is_in_no_error(scripted, client, status):
    """A proxy that repeats the header it refuses would put the key into status.json and the log."""
    scripted.answer = lambda path: (status, {}, json.dumps({"error": {"message": f"no: Bearer {KEY}\x1b[2J"}}).encode())
    for call in CALLS.values():
        try:
            call(client)
        except RolloutServerError as error:
            assert KEY not in str(error) and KEY not in repr(error) and "\x1b" not in str(error)
            assert KEY not in repr(error.__context__)
    assert KEY not in repr(client) + repr(client._http) + repr(client._http.headers)
    assert scripted.headers[0]["Authorization"] == f"Bearer {KEY}"


HEADERS = {"packed": {"Content-Encoding": "gzip"}, "short": {"Content-Length": "1000000", "Connection": "close"}}


@pytest.mark.parametrize("name", HEADERS)
def test_what_is_no_answer_of_vllm_is_an_error(scripted, client, name):
    """Another program on that port, or a proxy's page, ended the run with a traceback."""
    scripted.answer = lambda path: (200, HEADERS[name], b"<html>nginx</html>")
    for call in ("models", "complete", "mode"):
        with pytest.raises(RolloutServerError, match=scripted.url):
            CALLS[call](client)


def changed(**fields: Any) -> dict[str, Any]:
    answer = copy.deepcopy(COMPLETION)
    answer["choices"][0] |= fields
    return answer


def with_logps(*logps: Any, **fields: Any) -> dict[str, Any]:
    return changed(logprobs={"token_logprobs": list(logps)}, **fields)


FAULTS = {  # what the message says, and answers that it is about
    "is it a vLLM server": [
        {"choices": []}, changed(token_ids=["3", 9]), changed(token_ids=[True, 9]), changed(token_ids=[10**30, 9]),
        with_logps("-0.5", -1.0),
    ],
    "vLLM 0.10.2 or newer": [changed(token_ids=None)],
    "continued a different prompt": [changed(prompt_token_ids=[7])],
    "0.5, above 0": [with_logps(0.5, -1.0)],
    "no log-probability for each of its 2 tokens": [changed(logprobs=None), with_logps(-1.0)],
    "the weights are broken": [with_logps(logp, -1.0) for logp in (None, float("nan"), float("-inf"))],
    r"tokens, which neither a stop id nor the limit .*--max-model-len": [
        changed(token_ids=[9, 9]), with_logps(*[-1.0] * 9, token_ids=[3] * 8 + [9]), changed(finish_reason="error"),
        with_logps(-1.0, token_ids=[3]),  # as if the end were kept back with the text
    ],
}  # fmt: skip


def test_a_completion_that_cannot_be_is_not_trained_on(scripted, client):
    """Half of these were tracebacks, the rest went into the gradient."""
    scripted.answer = lambda path: (200, {}, json.dumps(COMPLETION).encode())
    assert CALLS["complete"](client) == ([3, 9], [-0.5, -1.0])
    for message, faults in FAULTS.items():
        for fault in faults:
            scripted.answer = lambda path, fault=fault: (200, {}, json.dumps(fault).encode())
            with pytest.raises(RolloutServerError, match=f"{scripted.url}.*{message}"):
                CALLS["complete"](client)
                pytest.fail(str(fault))


def test_no_connection_serves_two_requests(scripted, client):
    """Threads shared idle connections, and the pool closed one that it had just given to a request: a run ended in "Bad
    file descriptor"."""
    scripted.answer = lambda path: (200, {}, json.dumps(COMPLETION).encode())
    for _ in range(3):
        CALLS["complete"](client)
    assert len(scripted.requests) == len({id(connection) for connection in scripted.requests}) == 3

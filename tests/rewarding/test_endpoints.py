"""Endpoints that judges stand behind: what people write into `url`, what servers answer, and what the environment puts
between. Each works, or is refused by one sentence with the fix before a model loads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.graders import judge as module
from rloo_kit.graders.judge import JudgeReward
from rloo_kit.rewarding.guard import guard
from rloo_kit.system.versions import is_importable
from tests.scripted_server import Scripted

Answer = Callable[[str, str], tuple[int, dict[str, str], Any]]


class Endpoint(Scripted):
    """A server whose replies `answer(method, path)` makes: status, headers, and a text or a value for JSON."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()

        def encoded(path: str) -> tuple[int, dict[str, str], bytes]:
            status, headers, body = answer(self.requests[-1].command, path)
            return status, headers, (body if isinstance(body, str) else json.dumps(body)).encode()

        self.answer = encoded


def chat(content: Any = '{"score": 7}', **more: Any) -> tuple[int, dict[str, str], Any]:
    message = {"role": "assistant", "content": content} | more.pop("message", {})
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"total_tokens": 10}}
    return 200, {}, body | more


def under(prefix: str, reply: Any = None, missing: Any = (404, {}, "404 page not found")) -> Answer:
    """Serves chat completions and the model `m` below `prefix`, and nothing elsewhere."""

    def answer(method: str, path: str) -> Any:
        if path == f"{prefix}/models":
            return 200, {}, {"object": "list", "data": [{"id": "m"}]}
        return (reply or chat()) if path == f"{prefix}/chat/completions" else missing

    return answer


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Endpoint]]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", module.KEY):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0005)
    made: list[Endpoint] = []

    def start(answer: Answer) -> Endpoint:
        made.append(Endpoint(answer))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def judge(url: str, folder: Path, **params: Any) -> JudgeReward:
    return JudgeReward(**{"url": url, "model": "m", "thinking": False, "folder": folder, "run": "r"} | params)


def works(reward: JudgeReward, value: float = 6 / 9) -> bool:
    """Whether the check finds nothing and the reward is the judge's."""
    assert reward.find_fault() == ""
    found = guard(reward).score(prompts=["Say something."], completions=["A good answer."], completion_ids=[[1]])
    assert found.values == [pytest.approx(value)], found.failures
    return True


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        *(("/v1", end) for end in ("/v1", "/v1/", "", "/", "/v1/chat/completions", "/v1/chat/completions/")),
        *((prefix, "/openai/") for prefix in ("/openai", "/openai/v1")),  # a gateway serves below a path of its own
    ],
)
def test_a_url_with_and_without_its_version(serve: Any, tmp_path: Path, prefix: str, end: str) -> None:
    """404 in every sample for an address as Ollama, vLLM and llama.cpp print it, or with the whole path."""
    assert works(judge(serve(under(prefix)).url + end, tmp_path))


def test_a_server_that_answers_unknown_addresses_with_200(serve: Any, tmp_path: Path) -> None:
    """Guards against LM Studio's 'unexpected endpoint', which comes with status 200, and a front page in HTML."""
    for number, page in enumerate([{"error": "Unexpected endpoint or method."}, "<html>Welcome</html>"]):
        assert works(judge(serve(under("/v1", missing=(200, {}, page))).url, tmp_path / str(number)))


def test_an_address_of_nothing_is_one_sentence(serve: Any, tmp_path: Path) -> None:
    """Guards against a path that no server has, found in the first rollout."""
    found = judge(f"{serve(under('/v1')).url}/api/generate", tmp_path).find_fault()
    assert "HTTP 404" in found and "/v1" in found and "\n" not in found


@pytest.mark.parametrize(("status", "absolute"), [(301, True), (307, False)])
def test_a_redirect_names_the_address_to_set(serve: Any, tmp_path: Path, status: int, absolute: bool) -> None:
    """A gateway that sends /v1 to /api/v1 was followed by some methods only, and with the key to wherever it points."""

    def answer(method: str, path: str) -> Any:
        return status, {"Location": (endpoint.url if absolute else "") + "/api" + path}, ""

    endpoint = serve(answer)
    assert f"set url to {endpoint.url}/api/v1" in judge(f"{endpoint.url}/v1", tmp_path).find_fault()


def test_a_model_that_is_not_served_is_named_with_those_that_are(serve: Any, tmp_path: Path) -> None:
    """Guards against a misspelt model that is found after the weights have loaded."""
    refusal = 404, {}, {"error": {"message": "The model `x` does not exist."}}
    found = judge(f"{serve(under('/v1', refusal)).url}/v1", tmp_path, model="x").find_fault()
    assert "does not exist" in found and "serves m, not x" in found


def test_a_key_that_is_refused_is_named(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a key of another service."""
    monkeypatch.setenv("MY_KEY", "sk-test-0123456789")
    for status in (401, 403):
        endpoint = serve(under("/v1", (status, {}, {"error": "bad key sk-test-0123456789"})))
        found = judge(f"{endpoint.url}/v1", tmp_path, key_env="MY_KEY").find_fault()
        assert "MY_KEY" in found and ".env" in found and "0123456789" not in found
        assert endpoint.headers[0]["Authorization"] == "Bearer sk-test-0123456789"


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_stands_in_front_of_this_machine(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    """Guards against a company's proxy that is asked for a judge on this machine, which it cannot reach."""
    proxy = serve(lambda method, path: (502, {}, "no such host"))
    monkeypatch.setenv(name, proxy.url)
    endpoint = serve(under("/v1"))
    assert works(judge(f"{endpoint.url.replace('127.0.0.1', host)}/v1", tmp_path)) and not proxy.requests


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "gopher://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_one_sentence(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """Found before the run, in httpx's words; a judge on this machine needs no proxy at all."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    if proxy.startswith("socks") and is_importable("socksio"):
        pytest.skip("socksio is installed here, so httpx can use a SOCKS proxy")
    found = judge("http://judge.example:9/v1", tmp_path).find_fault()
    assert "proxy" in found and ("httpx[socks]" in found) == proxy.startswith("socks")
    assert works(judge(f"{serve(under('/v1')).url}/v1", tmp_path))


def test_a_proxy_is_used_for_other_machines(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a judge that only a proxy can reach."""
    proxy = serve(lambda method, path: chat())
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    assert works(judge("http://judge.example/v1", tmp_path))
    assert proxy.requests[0].requestline == "POST http://judge.example/v1/chat/completions HTTP/1.1"


@pytest.mark.parametrize("usage", [None, {"total_tokens": "10"}, {}], ids=str)
def test_a_budget_of_tokens_needs_a_count_of_them(serve: Any, tmp_path: Path, usage: Any) -> None:
    """Guards against max_tokens that never ends anything, because the server does not report them."""
    found = judge(f"{serve(under('/v1', chat(usage=usage))).url}/v1", tmp_path, max_tokens=1000).find_fault()
    assert "max_tokens is 1,000" in found and "max_calls" in found


@pytest.mark.parametrize(
    "headers", [{}, {"Retry-After": "0.01"}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}], ids=str
)
def test_too_many_requests_are_asked_again(serve: Any, tmp_path: Path, headers: dict[str, str]) -> None:
    """Guards against a run that is refused because the service is busy at that moment, whatever it says of when."""
    replies = iter([(429, headers, "slow down")] * 3)
    endpoint = serve(lambda method, path: next(replies, chat()))
    assert works(judge(f"{endpoint.url}/v1", tmp_path)) and len(endpoint.requests) == 5


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://no-such-host.invalid/v1", "https://127.0.0.1:1/v1"])
def test_nobody_there_is_one_sentence_at_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of retries before a run that cannot start."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 1e6)
    found = judge(url, tmp_path).find_fault()
    assert url in found and "start the judge" in found and "\n" not in found

"""Answers of a rollout server: a completion is refused or sound, because it goes into the gradient."""

import functools
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rloo_kit.vllm.client import VllmClient
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import json_values, mutated_json, texts
from tests.rollout.test_vllm_client import CALLS, COMPLETION, MODELS
from tests.scripted_server import Scripted

models, completions = (mutated_json(good, st.one_of(json_values(), texts())) for good in (MODELS, COMPLETION))
cases = st.tuples(
    st.one_of(st.tuples(st.just("models"), models), st.tuples(st.sampled_from(sorted({*CALLS} - {"up"})), completions)),
    st.sampled_from([200, 200, 200, 400, 404, 500]),
)


@functools.cache
def connect() -> tuple[Scripted, VllmClient]:
    """A server that answers as it is set to, and its client."""
    server = Scripted()
    return server, VllmClient(server.url, start_s=1.0, say=lambda line: None)


def read_answer(case: tuple[tuple[str, bytes], int], folder: Path) -> None:
    (call, body), status = case
    server, client = connect()
    server.answer = lambda path: (status, {}, body)
    found: Any = CALLS[call](client)
    if call == "complete":
        ids, logps = found
        assert len(ids) == len(logps) > 0
        assert all(type(token) is int and 0 <= token < 2**31 for token in ids)
        assert all(type(logp) is float and -1e300 < logp < 0.1 for logp in logps)


SURFACE = Surface("server answers", cases, read_answer, connect)


def test_an_answer_is_sound_or_refused_in_words() -> None:
    """Another program on that port, or a proxy's page, ended the run with a traceback."""
    check(SURFACE)

"""Replies of a worker: exact where they are replies, and one kind of error where they are anything else."""

import json
import math
import pickle
import random
from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch

from rloo_kit.rewarding.pipe import MAX_REPLY_BYTES, MalformedReply
from rloo_kit.rewarding.replies import Failure, Rewards, make_plain, read_reply, write_reply
from rloo_kit.rewarding.signature import Signature
from rloo_kit.rewarding.values import LONGEST_ERROR

REWARDS = Rewards([0.1, None, math.inf], [("log_metric", "length", 2.5), ("log_extra", "text", ["a", None, [1]])])


@pytest.mark.parametrize(
    "content",
    [
        Signature(("completions",), ("limit",), (), True, False),
        REWARDS,
        Failure("no", True),
        Rewards([5e-324, -0.0, 1.7976931348623157e308, 0.1 + 0.2, 1 / 3], []),
        True,
        None,
        0.1,
        "text \ud800",
    ],
)
def test_replies_arrive_as_they_were(content: Any) -> None:
    """A reward that lost its last digits on the way would train another policy."""
    assert read_reply(write_reply(7, content), 7) == content


def test_nan_arrives() -> None:
    """JSON proper has no NaN; it is the guard that refuses it, by its name."""
    assert math.isnan(read_reply(write_reply(1, Rewards([math.nan], [])), 1).values[0])


def reply(**parts: Any) -> bytes:
    return json.dumps({"call": 1, "kind": "value", "content": 1} | parts).encode()


BAD_REWARDS: list[Any] = [
    None,
    {},
    {"values": 1.0, "records": []},
    {"values": ["a", []], "records": []},
    {"values": [], "records": [["print", "a", 1.0]]},
    {"values": [], "records": [["log_metric", "a", "b"]]},
    {"values": [], "records": [["log_metric", 1, 1.0]]},
    {"values": [], "records": [["log_extra", "a", "b"]]},
    {"values": [], "records": [["log_extra"]]},
    {"values": [], "records": [1]},
]
SIGNATURE = {"required": [], "optional": [], "by_position": [], "anything": True, "in_worker": False}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 5000,
        b"{}",
        b"[1]",
        pickle.dumps(("value", 1.0)),
        reply(call=2),
        reply(call=None),
        reply(kind="other"),
        reply(content={}),
        reply(more=1),
        reply(kind="Failure", content="no"),
        reply(kind="Failure", content={"text": 1, "whole_batch": True}),
        *[reply(kind="Rewards", content=content) for content in BAD_REWARDS],
        reply(kind="Signature", content=SIGNATURE | {"anything": "yes"}),
        reply(kind="Signature", content=SIGNATURE | {"required": [1]}),
        reply(kind="Signature", content=SIGNATURE | {"required": 1}),
        reply(kind="Signature", content=SIGNATURE | {"__class__": "os.system"}),
        reply(kind="Signature", content=[]),
    ],
)
def test_anything_else_is_malformed(payload: bytes) -> None:
    """Guards against an error of another class, which would end the run and not only the call."""
    with pytest.raises(MalformedReply):
        read_reply(payload, 1)


def test_damaged_replies_are_malformed_or_whole() -> None:
    """A reply with bytes changed, cut or doubled: read, or refused; nothing else. 20,000 cases from a fixed seed."""
    rng, whole = random.Random(0), write_reply(1, REWARDS)
    refused = 0
    for _ in range(20_000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(damaged))
            damaged[place : place + rng.randint(0, 3)] = rng.choice([b"", rng.randbytes(1), whole[place : place + 9]])
        try:
            read_reply(bytes(damaged), 1)
        except MalformedReply:
            refused += 1
    assert refused > 10_000


def test_what_is_too_large_or_cannot_be_written_is_a_failure() -> None:
    """A reply without a limit is memory of the run's process."""
    large = read_reply(write_reply(1, Rewards([], [("log_extra", "a", ["x" * MAX_REPLY_BYTES])])), 1)
    assert isinstance(large, Failure) and large.whole_batch and "log_extra" in large.text
    odd = read_reply(write_reply(1, object()), 1)
    assert isinstance(odd, Failure) and "cannot be sent" in odd.text
    long = read_reply(write_reply(1, Failure("x" * 10**6)), 1)
    assert len(long.text) < LONGEST_ERROR + 50 and "1,000,000 characters" in long.text


def test_what_a_reward_logs_is_made_plain() -> None:
    """Guards against a tensor in log_extra that cannot be sent, and against numbers that arrive as texts."""
    found = make_plain(["a", 1, numpy.float32(0.5), torch.tensor([1.5, 2.0]), {1: (2, None)}, Decimal("1.5")])
    assert found == ["a", 1, 0.5, [1.5, 2.0], {"1": [2, None]}, "Decimal('1.5')"]

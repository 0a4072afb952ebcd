"""Rewards of a user's own, good and bad, as a config names them: `reward_examples:function`.

The tests copy this file next to a config or put its folder on the worker's path; it imports nothing but what it uses.
"""

import asyncio
import os
import sys


def by_length(prompts, completions, completion_ids, scale=1.0, **columns):
    print("a print in a reward must not break the protocol")
    return [scale * len(text) for text in completions]


def types_of_ids(completion_ids, **columns):
    return [float(all(type(token) is int for token in ids) and type(ids) is list) for ids in completion_ids]


def sees(completions, **columns):
    return [float(sum(key in columns for key in ("answer", "trainer_state", "prompts")))] * len(completions)


def logs(completions, log_metric=None, log_extra=None, **columns):
    log_metric("lengths/mean", 2.0)
    log_extra("first", [text[0] for text in completions])
    return [0.5 for _ in completions]


def process_id(completions, **columns):
    return [float(os.getpid()) for _ in completions]


def heavy_modules(completions, **columns):
    return [float(sum(name in sys.modules for name in ("torch", "transformers", "trl", "numpy")))] * len(completions)


def odd_numbers(completions):
    return [0.1 + 0.2, float("-inf")]


def published(completions):
    return [float(len(text)) for text in completions]


async def slow_ids(completion_ids, log_metric):
    log_metric("ids", 1.0)
    return [len(ids) for ids in completion_ids]


def limited(completions, limit):
    return [float(len(text) <= limit) for text in completions]


def wants_state(completions, trainer_state):
    return [1.0 for _ in completions]


def a_dict(completions):
    return dict.fromkeys(completions, 0.5)


def texts(completions):
    return [0.5 if index == 0 else "1" for index, _ in enumerate(completions)]


class Verdict(str):
    """A text of a class that only the worker's process knows."""


def verdicts(completions):
    return [0.5 if index == 0 else Verdict("1") for index, _ in enumerate(completions)]


def arrays(completions):
    import numpy

    return numpy.array([[float(len(text))] for text in completions])


class Scorer:
    def get_rewards(self, prompts, completions):
        return [float(len(prompt) - len(text)) for prompt, text in zip(prompts, completions, strict=True)]


scorer = Scorer()


LOOPS = []


async def same_loop(completions, **columns):
    """What a client of the module needs: the loop of its first call, still open."""
    LOOPS.append(asyncio.get_running_loop())
    return [float(LOOPS[0] is LOOPS[-1] and not LOOPS[0].is_closed()) for _ in completions]

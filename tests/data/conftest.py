"""A run to load data for, files to load, and how a prompt looks when it is rendered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig

BOTH = ("answer_reward", "length_reward")  # two tasks: the second scores rows without an answer


@pytest.fixture
def make_run() -> Callable[..., RunConfig]:
    """`make_run(source, rewards=..., **data)`: a run whose model says nothing about its family."""

    def build(source: Any = "unused.jsonl", reward: str | tuple[str, ...] = "length_reward", **data: Any) -> RunConfig:
        names = (reward,) if isinstance(reward, str) else reward
        return RunConfig(
            model={"name": "my-model"},
            data={"source": None if "sources" in data else str(source), "test_size": 0} | data,
            rewards=[{"name": name} for name in names],
            rloo={"max_steps": 1},
            run={"evaluate": False},
        )

    return build


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """`write(name, text)` makes a file in the test's folder."""

    def build(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return build


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rendered(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"


def plain(prompts: Any) -> list[str]:
    """Prompts as the source has them."""
    return [prompt.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0] for prompt in prompts]


class InPlace:
    """In the place of a `Worker`: this process, which has the library loaded."""

    running = True

    def __init__(self, *_):
        pass

    def call(self, function, *args, timeout_s, restart=True):
        return None if function.__name__ == "load_library" else function(*args)

    def close(self):
        pass

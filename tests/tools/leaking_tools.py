"""Tools, an environment and a reward that show a key which they were given, `MY_API_KEY`."""

import json
import os
import time
from urllib.parse import quote

KEY = os.environ["MY_API_KEY"]


def fails(by: str) -> str:
    """Fail with the key in the error.

    Args:
        by: how it is written there.
    """
    raise ConnectionError(f"401 for https://host/?q=1&key={written(by)}&page=2")


def shows(by: str) -> str:
    """Return the key.

    Args:
        by: how it is written there.
    """
    return f"401 for https://host/?q=1&key={written(by)}&page=2"


def returns(depth: int) -> object:
    """Return the key in a list, that deep.

    Args:
        depth: of the list.
    """
    return {"code": 401, "key": KEY} if not depth else [returns(depth - 1), 1, f"<{KEY}>"]


def is_no_text(length: int) -> object:
    """Return what JSON cannot hold.

    Args:
        length: of what stands before the key.
    """
    return {"x" * length + KEY}


def echo(text: str) -> str:
    """Return a text.

    Args:
        text: any.
    """
    return text


def hangs() -> str:
    """Never return."""
    while True:
        time.sleep(1)


def written(by: str) -> str:
    if by.isdecimal():  # behind so many characters that a limit cuts the key in the middle
        return "." * int(by) + KEY + "." * 200_000
    forms = {"quote": quote(KEY, safe=""), "quote twice": quote(quote(KEY, safe=""), safe=""), "as it is": KEY}
    forms |= {"json": json.dumps(KEY)[1:-1], "php": json.dumps(KEY)[1:-1].replace("/", "\\/"), "repr": repr(KEY)[1:-1]}
    forms |= {"json in repr": repr({"body": json.dumps({"key": KEY})})}
    forms |= {"codes": "".join(f"\\u{ord(one):04X}" for one in KEY), "bytes": repr(KEY.encode())[2:-1]}
    forms |= {"small hex": "".join(f"%{octet:02x}" for octet in KEY.encode())}
    return forms[by]


class Leaky:
    """An environment that shows the key wherever it can."""

    def reset(self, fail: int = 0, **row: object) -> str:
        """Show it in the observation, or fail."""
        if fail:
            raise ConnectionError(f"no host {KEY}")
        self.url, self.one, self.parts = f"https://host/?key={KEY}", 1, [{"key": KEY, KEY: 1.0}]
        return f" Ask {self.url}."

    def look(self) -> str:
        """Look."""
        return f"from {self.url}"

    def respond(self, messages: list) -> list:
        """Show it in a message."""
        return [{"role": "user", "content": f"use {KEY}", "number": len(messages)}]

    def get_reward(self) -> float:
        """Fail."""
        raise ValueError(f"no reward from {self.url}")


def rate(completions: list, log_extra: object = None, log_metric: object = None, **columns: object) -> list:
    if completions[0] == "fails":
        raise ConnectionError(f"401 for https://host/?key={quote(KEY, safe='')}")
    if completions[0] == "a text":
        return f"key {KEY}"
    log_extra("reply", [f"from {KEY}", {"key": KEY, "n": 1}])
    log_metric("judge/n", 1.0)
    return [1.0, KEY]

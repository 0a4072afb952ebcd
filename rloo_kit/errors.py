"""Every error that the kit raises on purpose: a `RlooKitError` and the standard exception that fits.

A message states what was found, the limit, and the key or command that fixes it.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

LONGEST_LINE, MOST_LINES = 1000, 100
LONGEST_ERROR = 2000  # characters of a caught error's text
# What moves a terminal's cursor, reverses its text or cannot be written at all.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_hidden: set[str] = set()
_pattern: re.Pattern[str] | None = None  # of the hidden values, in each spelling


def hide(values: Iterable[str]) -> None:
    """From now on `mask` replaces these secret values, and so does whatever cuts or prints a text here."""
    global _pattern
    _hidden.update(filter(None, values))
    longest_first = sorted(_hidden, key=len, reverse=True)
    spelled = ["".join(map(_spell, re.sub(r"\\+", r"\\", secret))) for secret in longest_first]
    _pattern = re.compile("|".join(spelled)) if spelled else None


def _spell(letter: str) -> str:
    """A pattern of a secret's character: as it is, or as JSON, Python or an address (%2F, %252F) has it, behind any
    number of backslashes (quoted several times); a run of backslashes is one character."""
    if letter == "\\":
        return r"(?:(?:\\{1,99}+(?i:u005c|x5c)|%(?:25){0,9}5[cC]){1,99}+|\\{1,99}+)"
    quoted = {json.dumps(letter)[1:-1], ascii(letter)[1:-1], f"u{ord(letter):04x}", letter.replace(" ", "+")}
    octets = letter.encode("utf-8", "surrogateescape")
    quoted |= {"".join(f"{mark}{octet:02x}" for octet in octets) for mark in ("%", "\\x")}
    others = "|".join(re.escape(one.lstrip("\\")) for one in sorted(quoted - {letter}))
    others = others.replace(r"\\", r"\\{0,99}+").replace("%", "%(?:25){0,9}")
    return rf"\\{{0,99}}+(?:(?i:{others})|{re.escape(letter)})"


def mask(value: Any) -> Any:
    """`value`, a text or a list or mapping with texts, with `***` for each hidden value; keys and numbers stay."""
    if _pattern is None or not isinstance(value, str | dict | list | tuple):
        return value
    if isinstance(value, dict):
        return {key: mask(one) for key, one in value.items()}
    return _pattern.sub("***", value) if isinstance(value, str) else [mask(one) for one in value]


def excerpt(value: Any, longest: int = 120) -> str:
    """`repr(value)` for a message, cut at `longest` characters; names the type if repr fails.

    >>> excerpt("a" * 99, 20), excerpt(10**5000)
    ("'aaaaaaaaaaaaaaaa...", 'a value of type int')
    """
    try:
        text = mask(repr(value))
    except Exception:  # an object's repr is a program that may raise anything; 10**5000 and a list in itself have none
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def shorten(text: str, longest: int = 2000, tail: int = 0) -> str:
    """At most `longest` characters of `text`: the first ones, the original length, and the last `tail`.

    >>> shorten("found, the limit and the fix", 28), shorten("found, the limit and the fix", 27, tail=3)
    ('found, the limit and the fix', 'fou ... (28 characters) fix')
    """
    text = mask(text)  # before the cut, which would leave half a secret
    if len(text) <= longest:
        return text
    end = f" ... ({len(text):,} characters) {text[len(text) - tail :]}".rstrip()
    return text[: max(longest - len(end), 0)] + end


def describe_error(error: BaseException, where: str = "") -> str:
    """An error's class and text, then `where`. A long text is cut; one that cannot be built is left out."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be made"
    return f"{printable(type(error).__name__, 60)}: {printable(text, LONGEST_ERROR // 2)}{where}"


def printable(text: str, longest: int = LONGEST_ERROR) -> str:
    """`text`, shortened and encodable as UTF-8."""
    return shorten(text, longest).encode("utf-8", "replace").decode()


class RlooKitError(Exception):
    """Root of the kit's errors. The text may contain user input, so it is cut and escaped before printing."""

    def __str__(self) -> str:
        lines = mask(super().__str__()).split("\n")
        left_out = [f"... and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
        text = "\n".join([*(shorten(line, LONGEST_LINE, tail=250) for line in lines[:MOST_LINES]), *left_out])
        return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


class ConfigError(RlooKitError, ValueError):
    """A configuration file, an override or an argument cannot be used as is."""


class ImportOrderError(RlooKitError, ImportError):
    """A library was imported before the one that has to patch it (Unsloth before TRL, Transformers and PEFT)."""


class SetupError(RlooKitError, RuntimeError):
    """The machine or the installation cannot do what was requested."""


class BackendError(RlooKitError, RuntimeError):
    """A model could not be loaded, saved or continued by the chosen backend."""


class ExportError(RlooKitError, RuntimeError):
    """A trained model could not be exported, or the export differs from the trained model."""


class RolloutServerError(RlooKitError, ConnectionError):
    """A rollout server cannot be reached, or cannot do what the run needs."""


class TokenizerError(RlooKitError, ValueError):
    """A tokenizer disagrees with the ids that the rewards and the rollout rely on."""


class DataError(RlooKitError, ValueError):
    """A data source has a row, a column or a file that cannot be used."""


class ToolError(RlooKitError, RuntimeError):
    """Tools failed too often to continue."""


class RewardError(RlooKitError, RuntimeError):
    """Reward functions failed too often to continue, or a reward cannot be built."""


class WholeBatchError(RewardError):
    """A reward failed on the whole batch (a hang, a dead process): scoring sample by sample would not help."""


class RunExistsError(RlooKitError, FileExistsError):
    """A run's folder already contains a run."""


class RunNotFoundError(RlooKitError, FileNotFoundError):
    """A run's folder, or a requested file in it, does not exist."""


class HealthError(RlooKitError, RuntimeError):
    """Training was stopped by a health rule, as set in `health:`."""


class NoSignalError(HealthError):
    """Training was stopped because its steps carried no learning signal."""


class NonFiniteError(RlooKitError, FloatingPointError):
    """Training was stopped because too many consecutive steps had NaN or infinity."""

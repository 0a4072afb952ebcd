"""The text of the kit's errors: short, and printable whatever a user gave."""

import json
from urllib.parse import quote, quote_plus, urlencode

import pytest

from rloo_kit.errors import (
    LONGEST_LINE,
    MOST_LINES,
    ConfigError,
    RewardError,
    RunNotFoundError,
    describe_error,
    excerpt,
    hide,
    mask,
    shorten,
)


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    """A value of a megabyte filled the screen; the key stands in front of it, the fix behind."""
    given = f"rloo.beta: is {'9' * 1_000_000}; it takes a number"
    text = str(ConfigError(given))
    assert len(text) <= LONGEST_LINE and text.startswith("rloo.beta: is 9") and text.endswith("; it takes a number")
    assert f"({len(given):,} characters)" in text
    many = str(ConfigError("\n".join(f"key{number}: unknown" for number in range(MOST_LINES + 7))))
    assert many.splitlines()[-1] == "... and 7 more lines" and len(many.splitlines()) == MOST_LINES + 1


def test_a_message_does_not_command_the_terminal() -> None:
    """A key with an escape sequence cleared the screen that showed the error; half a character broke the printing."""
    for kind in (ConfigError, RewardError, RunNotFoundError):
        assert str(kind("a\x1b[2Jb\0\r\u202e\ud83d\x85é\n\tß 😀")) == r"a\x1b[2Jb\x00\r\u202e\ud83d\x85é" + "\n\tß 😀"


def test_an_excerpt_has_no_repr_to_fail() -> None:
    """10**5000 has no repr (ValueError), neither has a list within a list, a thousand times."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert excerpt(10**5000) == "a value of type int" and excerpt(deep) == "a value of type list"


KEYS = (
    "sk-Canary/4711+abc",
    "a\"b'c\\d\\\\e",
    "two\nlines\tand 50%",
    "p%40ss%2Fw",
    "\\/\\/",
    "gr\u00fc\u00dfe-\U0001f600",
    "&<key>;=?",
)
SPELLINGS = {
    "as it is": str, "repr": lambda key: repr(key)[1:-1], "ascii": lambda key: ascii(key)[1:-1],
    "JSON": lambda key: json.dumps(key)[1:-1], "JSON of PHP": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "JSON in JSON": lambda key: json.dumps(json.dumps(key)[1:-1])[1:-1],
    "JSON in repr in repr": lambda key: repr(repr(json.dumps(key)))[4:-4],
    "code points": lambda key: "".join(f"\\u{ord(c):04X}" if ord(c) < 2**16 else json.dumps(c)[1:-1] for c in key),
    "bytes": lambda key: repr(key.encode())[2:-1], "address": lambda key: quote(key, safe=""), "path": quote,
    "query": quote_plus, "form": lambda key: urlencode({"": key})[1:],
    "address in address": lambda key: quote(quote(key, safe=""), safe=""),
    "small hex": lambda key: "".join(f"%{octet:02x}" for octet in key.encode()),
}  # fmt: skip


@pytest.mark.parametrize("how", SPELLINGS)
def test_a_secret_is_masked_in_every_spelling(how: str) -> None:
    """A server echoed a key as JSON writes it (abc\\/def), an HTTP library percent-encoded it in an address: a search
    for the value itself found neither."""
    hide(KEYS)
    for key in KEYS:
        written = SPELLINGS[how](key)
        for text in (written, f"key={written}&page=2", f'{{"key": "{written}"}}', f"{written} and {written}"):
            assert mask(text) == text.replace(written, "***"), (key, text)
        for error in (ConfigError(f"401: {written}"), RewardError(f"a\nb: {written}\nc")):
            assert str(error).count("***") == 1 and describe_error(error).count("***") == 1
    hide(["sk-\udce9-of-latin-1"])  # a variable's bytes that are no UTF-8
    assert [mask(f"sk-{one}-of-latin-1") for one in ("\udce9", "\\udce9", "%E9", "\\xe9")] == ["***"] * 4
    other = "/4711+abc is half a key, and sk-canary/4711+abc another one"
    assert mask(other) == other


def test_no_cut_leaves_half_a_secret() -> None:
    """A limit of 500 characters cut an error within the key, and what was left no longer looked like it."""
    key = KEYS[0]
    hide([key])
    for length in range(40, 140):
        line = "x" * (length - 30) + key + "y" * 99
        lines = "x" * (LONGEST_LINE - length) + key + "y" * 999 + "\n" + "x" * 999 + key + "y" * (250 - length % 40)
        cut = (excerpt(line, length), shorten(line, length), str(RewardError(lines)), describe_error(OSError(lines)))
        for text in cut:
            assert not any(key[at : at + 4] in text for at in range(len(key) - 3)), text


def test_of_secrets_that_begin_alike_the_longer_is_masked_whole() -> None:
    """With the shorter one first, the rest of the longer one stayed: ***-production."""
    hide(["sk-abc", "sk-abc-production"])
    hide(["sk-abc-prod", ""])
    assert mask("sk-abc, sk-abc-production; sk-abc-prod: sk-abcd") == "***, ***; ***: ***d"


def test_without_a_secret_nothing_is_masked() -> None:
    """An empty value, of a variable that is not set, would match everywhere."""
    hide([""])
    assert mask("text") == "text"


@pytest.mark.parametrize("text", ["\\" * 300_000, "%25" * 100_000, '\\\\"' * 100_000, "+ " * 150_000, "%5c%" * 75_000])
def test_a_text_made_to_be_slow_is_masked_in_time(text: str) -> None:
    """A pattern that tries each way to read a run of backslashes takes minutes for a result that a tool found in the
    web; these take a tenth of a second."""
    hide(["\\a\\", "%%%%x", '\\"\\"\\"x', "   x", "\\x5c\\x5c!"])
    assert mask(text) == text

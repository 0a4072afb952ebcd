"""The text of the kit's errors: short, and printable whatever a user gave."""

from rloo_kit.errors import LONGEST_LINE, MOST_LINES, ConfigError, RewardError, RunNotFoundError, excerpt


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
    assert excerpt("x" * 500, 20) == "'" + "x" * 16 + "..."

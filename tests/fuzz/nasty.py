"""Bad input: texts, values, YAML, and ways to corrupt good text."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]

CHARACTERS = [
    "\0", "\x07", "\x1b[2J", "\u2028", "\ufeff", "\ud83d", "\t", "\r", "\n", "²", "é", "\u202e", "{", "}", "[", "]",
    ": ", "- ", "#", "&", "*", "!", "|", "%", "@", "'", '"', "\\", "=", ".", ",", "?", "<<", "---", "...", "~",
]  # fmt: skip
TEXTS = [
    "", " ", "null", "no", "-", "-0", "1e400", "1" * 5000, "0x" + "f" * 5000, "x" * 20_000, "a.b.c", "../x", "/", "..",
    "~nobody-of-that-name/x", "a\0b", "\ud83d", "é\u0301", "\x1b[31m", "<think>", "</think>", "<|im_end|>", "²", "٣",
    "1_000", "0b11", "1:30:00", "2026-11-23", "=", "a=b", "%", "{}", "[[[", "]]]", "{a: b", "'", '"', "\\", "\r",
    "a\nb", "*a", "&a", "!!", "|", "@", "embedded/addition", "embedded/thinking", "length_reward", "nowhere.jsonl",
    "os:system",
]  # fmt: skip


def bomb(levels: int = 9, wide: int = 9, merge: bool = False) -> str:
    """A few hundred bytes of YAML that expand to wide ** levels values."""
    lines = ["a0: &a0 {k: 1}" if merge else "a0: &a0 [x, x]"]
    for level in range(1, levels + 1):
        names = ", ".join([f"*a{level - 1}"] * wide)
        lines.append(f"a{level}: &a{level} {{<<: [{names}]}}" if merge else f"a{level}: &a{level} [{names}]")
    return "\n".join(lines) + "\n"


SNIPPETS = [
    "!!timestamp x", "!!timestamp [a]", "!!bool x", "!!float ''", "!!int x", "!!int 0x", "!!int '²'", "!!str [a]",
    "!!seq {a: b}", "!!map [a]", "!!binary x", "!!binary aGVsbG8=", "!!set {a, b}", "!!omap [a]", "!!pairs x",
    "!!merge x", "!!python/object/apply:os.system [echo]", "!!python/name:os.system x", "!unknown [a]", "!<tag:x> y",
    "!", "! x", "!<", "!e!x y", "&a [*a]", "&a {k: *a}", "*nowhere", "&a x", "<<", "{<<: *nowhere}", "{<<: [1, 2]}",
    "{<<: {a: 1}, b: 2}", "[a, {<<: [{a: 1}, {b: 2}]}]", "0x" + "f" * 5000, "1" * 5000, "-" + "9" * 400,
    "0o" + "7" * 3000, "-1e400", ".nan", "-.inf", "1e-400", "1_000", "0b1", "1:30", "0.1.2", "{? [a] : b}", "{? : }",
    "{a: 1, a: 2}", "{null: 1}", "{.nan: x}", "{[a]: b}", "[,]", "[" * 600, "[" * 600 + "]" * 600, "{a: " * 600,
    "- " * 500 + "x", "|9\n x", ">+\n\n", "'unclosed", '"\\x"', '"\\ud83d"', '"\\0"', '"\\U00110000"', '"\\x1b[2J"',
    "x" * 30_000, "? " + "k" * 2000 + " : v", "\t- x", "@x", "%x", "[1, two, 3.0, null, true]", "[{name: null}]",
    "{r: {r: {r: 1}}}", "''", "2026-11-23T00:00:00Z", "2026-99-99",
]  # fmt: skip
DOCUMENTS = [
    "", "\n", "#", "---", "--- x", "---\n---\n", "a: 1\n---\nb: 2\n", "%YAML 9.9\n---\na: 1\n", "%YAML\n---\n",
    "%YAML 1.1\n---\na: no\n", "%TAG ! x\n---\n! a\n", "%FOO bar\n---\na\n", "x", "5", "[a, b]", "- a\n- b\n",
    "a: 1\na: 2\n", "? [a]\n: b\n", "? {a: b}\n: c\n", "a:\n\t- b\n", "a: b: c\n", "a:\r b: 1\r", "\ufeff\ufeffa: 1\n",
    "a: \0\n", "a\0: 1\n", "a: \ud83d\n", "a: \x07\n", "&a {b: *a}\n", "&a : *a\n", "? *a\n: &a 1\n", "a: *b\n", bomb(),
    bomb(30, 2), bomb(merge=True), bomb(5, 12), "&a [" + "*a," * 500 + "]", "[" * 10_000, "{" * 10_000, "- " * 5_000,
    "[" * 10_000 + "]" * 10_000, "? " * 3_000, "!!set\n? a\n? b\n", "!!omap\n- a: 1\n",
    "!!python/object:os.system {}\n", "!!str\na: 1\n", "!!map\n- a\n", "!!binary |\n x\n", "!!float [1]\n",
    "k" * 200_000, "k" * 2_000 + ": v\n", "a: |\n" + " x\n" * 2_000, "a: '" + "\n" * 2_000,
    "\n".join(f"k{n}: {n}" for n in range(2_000)),
    "run: &r {name: x}\nmodel: *r\ndata: *r\nrloo: *r\nrewards: [*r, *r]\n", "<<: [x]\n", "? <<\n: [[a]]\n", "<<: *a\n",
    "!!merge [a]: y\n",
]  # fmt: skip


PLAIN_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, -(10**400), 10**5000,
    [], {}, [None], [[]], [1, "a", None], ["a", ["b"]], {"a": 1}, {"a": {"b": [1]}}, {"": 1}, [{"a": 1}, {"a": "x"}],
]  # fmt: skip


def texts() -> st.SearchStrategy[str]:
    """Known bad texts, and arbitrary ones (including lone surrogates and control characters)."""
    return st.one_of(st.sampled_from(TEXTS), st.text(st.characters(), max_size=8), st.sampled_from(CHARACTERS))


def json_values() -> st.SearchStrategy[Any]:
    """Anything that a JSON file can contain."""
    single = st.one_of(st.sampled_from([one for one in PLAIN_VALUES if one != 10**5000]), texts(), st.floats())
    return st.recursive(
        single, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3), max_leaves=4
    )


def snippets() -> st.SearchStrategy[str]:
    """A known bad YAML value, or any text instead."""
    return st.one_of(st.sampled_from(SNIPPETS), texts())


@st.composite
def mutated_yaml(draw: st.DrawFn, goods: list[str]) -> bytes:
    """The bytes of a good YAML text with one to three faults, or of a bad one."""
    if draw(st.integers(0, 5)) == 0:
        text = draw(st.sampled_from(DOCUMENTS))
        if draw(st.booleans()):
            text += draw(st.sampled_from(goods))
        return _encoded(draw, text)
    lines = draw(st.sampled_from(goods)).splitlines()
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        number = draw(st.integers(0, max(0, len(lines) - 1)))
        line = lines[number] if lines else ""
        indent = line[: len(line) - len(line.lstrip())]
        kind = draw(st.integers(0, 7))
        if kind <= 2:  # another value
            lines[number : number + 1] = [f"{line.partition(':')[0]}: {draw(snippets())}"]
        elif kind == 3:  # another key
            lines[number : number + 1] = [f"{indent}{draw(snippets())}:{line.partition(':')[2]}"]
        elif kind == 4:  # one more
            lines.insert(number, f"{indent}{draw(texts())}: {draw(snippets())}")
        elif kind == 5:  # one less, or twice
            lines[number : number + 1] = draw(st.sampled_from([[], [line, line], [" " + line], ["\t" + line]]))
        elif kind == 6:  # a character within
            at = draw(st.integers(0, len(line)))
            lines[number : number + 1] = [line[:at] + draw(st.sampled_from(CHARACTERS)) + line[at:]]
        else:
            lines[number : number + 1] = [draw(snippets())]
    return _encoded(draw, "\n".join(lines) + "\n")


def _encoded(draw: st.DrawFn, text: str) -> bytes:
    encoding = draw(st.sampled_from(["utf-8"] * 9 + ["utf-8-sig", "utf-16", "utf-32", "latin-1"]))
    return _spoiled(draw, text.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace"))


def _spoiled(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes, one time in twenty with other bytes in between, and one in thirty cut."""
    at = draw(st.integers(0, len(content)))
    if draw(st.integers(0, 19)) == 0:
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 4)) :]
    return content[:at] if draw(st.integers(0, 29)) == 0 else content


def yaml_of(folder: Path, pattern: str) -> list[str]:
    """Shipped YAML files without their headers, so that faults hit keys."""
    files = [path.read_text().splitlines() for path in sorted(folder.glob(pattern))]
    return ["\n".join(line for line in lines if line.strip() and line[0] != "#") + "\n" for lines in files]

"""Files that a user wrote: where they are looked up, text of a bounded size, YAML 1.2 (`5e-6` is a number, `no` is
text) with bounded aliases.

Any fault in one raises a ConfigError with its line.
"""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML, MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scanner import Scanner, ScannerError

from rloo_kit.errors import ConfigError, excerpt

MOST_BYTES = 1_000_000  # of a YAML file; those of the kit have a few hundred
DEEPEST = 100  # levels of [ and {; for thousands ruamel takes seconds, then overflows Python's stack
MOST_NODES = 100_000  # values and keys of a YAML text, each counted as often as its aliases repeat it
HANDED_OVER = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes that the shell has opened: <(command), command |
is_file = os.path.isfile  # unlike Path.is_file False for an impossible name, too, or in a locked folder
_TAG = "tag:yaml.org,2002:"


class Constructor(SafeConstructor):
    """Plain values only: dates are text; binary data, sets, pairs and text that no file can take are refused."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        value, what = None, None
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # ruamel does not check a tagged value
            what = f"{error} ({node.tag})" if isinstance(error, ValueError) else f"the value does not fit {node.tag}"
        if isinstance(value, int) and value.bit_length() > 64:
            what = "a whole number of more than 64 bits; write it as text, in quotes, or with an exponent (1e30)"
        elif isinstance(value, str) and (problem := find_unwritable(value)):
            what = f"a text with {problem}"
        if what:
            raise ConstructorError(None, None, what, node.start_mark)
        return value


class BoundedScanner(Scanner):
    """Refuses brackets nested deeper than `DEEPEST` levels."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        if len(self.flow_context) >= DEEPEST:
            mark = self.reader.get_mark()
            raise ScannerError(None, None, f"nested too deeply, more than {DEEPEST} levels of brackets", mark)
        super().fetch_flow_collection_start(TokenClass, to_push)


Constructor.add_constructor(_TAG + "timestamp", SafeConstructor.construct_yaml_str)
for _name in ("binary", "set", "omap", "pairs"):
    Constructor.yaml_constructors.pop(_TAG + _name, None)


def find_unwritable(text: str) -> str | None:
    """What in `text` no file name and no UTF-8 file can contain, in words; None if nothing.

    >>> find_unwritable("a\\0"), find_unwritable("é")
    ('a NUL character', None)
    """
    if "\0" in text:
        return "a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character ({text[error.start].encode('unicode_escape').decode()})"
    return None


def expand_user(path: str, key: str) -> Path:
    """`path` with `~` expanded; raises ConfigError, which names `key`, if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key}: is {excerpt(path)}, but this machine has no such user; write the folder out"
        ) from None


def working_folder() -> Path:
    """The folder in which the user started the program: outputs land and lookups begin there. `Path()`: this process's.

    A kernel runs in its notebook's folder; the user's is that of `jupyter lab`, until a cell changes the directory.
    Hosted services start that in `/`, which nobody chose.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if (
        shell is not None
        and shell.starting_dir == os.getcwd()
        and os.environ.get("JPY_PARENT_PID") == str(os.getppid())
    ):
        with suppress(psutil.Error):
            folder = Path(psutil.Process(os.getppid()).cwd())
            return Path() if folder in (Path.cwd(), Path(folder.root)) else folder
    return Path()


def places_of(path: str, key: str, *others: Path | None) -> list[Path]:
    """Where a user's path is looked up: in the working folder, the process's own, then `others`; an absolute one only
    there. `key` is for the error about `~nobody`."""
    written = expand_user(path, key)
    folders = (working_folder(), Path(), *filter(None, others))
    return list(dict.fromkeys((folder / written).absolute() for folder in folders))


def from_here(path: str | Path) -> Path:
    """A path that a function was called with: as given, but in a kernel absolute, by the same lookup."""
    places = [working_folder() / path, Path(path)]
    found = next(filter(os.path.exists, places), places[-1])
    return found if places[0] == places[1] else found.absolute()


def looked_for(places: list[Path], key: str) -> str:
    """The end of an error about a missing file or folder: its places, and `key` to set."""
    return f"looked for as {' and as '.join(map(str, places))}; set {key} to its path"


def find_input(path: str, key: str, *others: Path | None) -> Path:
    """The first file among `places_of`; raises ConfigError if there is none."""
    places = places_of(path, key, *others)
    if (found := next(filter(is_file, places), None)) is None:
        raise ConfigError(f"there is no file {path}; {looked_for(places, key)}")
    return found


def find_target(target: str, key: str, next_to: Path | None) -> tuple[str, list[Path]]:
    """A user's `module:name` or `path/to/file.py:name`, its file absolute, and the folders where its modules are;
    `next_to`: a further folder, the config's. Raises ConfigError if there is no such file."""
    module, _, name = target.rpartition(":")
    if not module.endswith(".py"):
        return target, places_of("", key, next_to)
    file = find_input(module, key, next_to).resolve()
    return f"{file}:{name}", [file.parent]


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The UTF-8 text of a regular file, or of a pipe that the shell opened for this process (`<(command)`). Raises
    FileNotFoundError if nothing is there, ConfigError for anything else, or more than `most_bytes`."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a folder; name a file in it")
        if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and str(path).startswith(HANDED_OVER)):
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise ConfigError(f"{path} is {kind}; a regular file is needed, or <(command) in the shell")
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
    except (FileNotFoundError, ConfigError):
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path}: no file can have this name: {find_unwritable(str(path))}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{path} has more than {most_bytes:,} bytes, which is the limit of such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: cannot be read as UTF-8 text: {error.reason}; save it as UTF-8") from None


def make_reader(version: tuple[int, int] | None = None) -> YAML:
    """ruamel's reader of plain values; `version` (1, 1) reads `no` as false, as PyYAML does."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Scanner = Constructor, BoundedScanner
    yaml.version = version
    return yaml


def parse_yaml(text: str, source: str, version: tuple[int, int] | None = None) -> tuple[Any, Node | None]:
    """The value of a YAML text (None for an empty one) and its tree of nodes, for their lines. Raises ConfigError if it
    is not plain YAML, is nested too deeply, or its aliases repeat more than `MOST_NODES` values."""
    yaml = make_reader(version)
    try:
        node = yaml.compose(text)
        if node is not None and _count_nodes(node, {}) > MOST_NODES:
            raise ConfigError(
                f"{source}: with its aliases (*name) written out it has more than {MOST_NODES:,} values, which is the "
                "limit; repeat less by aliases"
            )
        return None if node is None else yaml.constructor.construct_document(node), node
    except ConfigError:
        raise
    except RecursionError:
        line, problem = "", "nested too deeply, or an alias (*name) inside the value that it names"
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    except (ValueError, AssertionError):  # ruamel checks neither
        line, problem = "", "an escape (\\U...) that is no character, or a %YAML version that is not known"
    raise ConfigError(f"{source}{line}: not readable as YAML: {problem}")


def _count_nodes(node: Node, counted: dict[int, int]) -> int:
    """The nodes at and below `node`; a repeated one counts each time. Raises RecursionError if a node contains itself,
    ConstructorError for a key that is not a scalar."""
    if id(node) not in counted:
        counted[id(node)] = 0  # being counted
        parts = list(node.value) if isinstance(node, SequenceNode) else []
        for key, value in node.value if isinstance(node, MappingNode) else ():
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a list or a mapping as a key; a key is text", key.start_mark)
            parts += [key, value]
        counted[id(node)] = 1 + sum(_count_nodes(part, counted) for part in parts)
    elif not counted[id(node)]:
        raise RecursionError
    return counted[id(node)]


Key = tuple[str | int, ...]


def collect_lines(node: Node | None, path: Key = ()) -> dict[Key, int]:
    """The line of each key and list item below `node`."""
    entries: list[tuple[Any, Node, Node]] = []
    if isinstance(node, MappingNode):
        entries = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, SequenceNode):
        entries = [(index, item, item) for index, item in enumerate(node.value)]
    lines: dict[Key, int] = {}
    for key, place, value in entries:
        lines[(*path, key)] = place.start_mark.line + 1
        lines |= collect_lines(value, (*path, key))
    return lines


def is_deep(value: Any) -> bool:
    """Whether lists and mappings in `value` are nested more than DEEPEST levels deep."""
    left = [(value, 1)]
    while left:
        inner, level = left.pop()
        if isinstance(inner, (list, tuple, dict)):
            if level > DEEPEST:
                return True
            left += [(item, level + 1) for item in (inner.values() if isinstance(inner, dict) else inner)]
    return False

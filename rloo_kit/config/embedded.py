"""Names of the built-in models and of their task families: `embedded/thinking@sorting`, `embedded/sorting`,
`smollm2/instruct`.

A user's family is named by the path of its file. The run's folder keeps a copy under the same file name.
"""

from pathlib import Path

from rloo_kit.errors import ConfigError
from rloo_kit.system.environment import cache_folder
from rloo_kit.system.input_files import find_input, is_file

KINDS = ("thinking", "instruct", "untaught")  # untaught: a thinking model with random weights
FAMILIES = ("addition", "subtraction", "sorting")  # modules of data/families
DEFAULT_FAMILY = "addition"
EMBEDDED_PREFIX = "embedded/"
SMOLLM2_PREFIX = "smollm2/"  # a real language model, from a Python package
SMOLLM2 = ("smollm2/instruct", "smollm2/thinking")
KEPT_FAMILIES = "task_families"  # in the run's folder: copies of the user's family files


def split_model_name(name: str) -> tuple[str, str]:
    """Kind and family of an embedded model; the prefix is optional.

    >>> split_model_name("embedded/thinking@sorting"), split_model_name("instruct")
    (('thinking', 'sorting'), ('instruct', 'addition'))
    """
    kind, _, family = name.removeprefix(EMBEDDED_PREFIX).partition("@")
    return kind, family or DEFAULT_FAMILY


def smollm2_folder(name: str) -> Path:
    """Where the cache has `smollm2/instruct` or `smollm2/thinking`, built or not."""
    return cache_folder() / f"{name.replace('/', '-')}-r1"


def is_family_file(family: str) -> bool:
    """Whether a family is named by the path of a user's file."""
    return family.endswith(".py")


def find_embedded_problem(name: str) -> str | None:
    """Why no embedded model has that name (prefix optional); None if one does. Files are not looked up.

    >>> find_embedded_problem("embedded/thinking@sortin")
    "there is no task family 'sortin': take addition, subtraction, sorting, or the path of your own .py file"
    """
    kind, _, family = name.removeprefix(EMBEDDED_PREFIX).partition("@")
    if kind not in KINDS:
        names = ", ".join(f"{EMBEDDED_PREFIX}{kind}" for kind in KINDS)
        return f"there is no embedded model '{kind}': model.name is {names}, or {EMBEDDED_PREFIX}thinking@FAMILY"
    if "@" not in name:
        return None
    if kind != "thinking":
        return f"'{name}' names a task family, which only {EMBEDDED_PREFIX}thinking@{family or 'FAMILY'} takes"
    return find_family_problem(family)


def find_family_problem(family: str) -> str | None:
    """Why no task family has that name; None if one does. Files are not looked up."""
    if is_family_file(family) or family in FAMILIES:
        return None
    return f"there is no task family '{family}': take {', '.join(FAMILIES)}, or the path of your own .py file"


def find_family_file(name: str, config_file: Path | None = None) -> Path:
    """Absolute path of a user's family file: the run's copy if `config_file` is in a run's folder, else `find_input`,
    last next to `config_file`. Raises ConfigError if there is none."""
    if config_file is not None and config_file.name == "config.yaml":
        kept = config_file.parent / KEPT_FAMILIES / Path(name).name
        if is_file(kept):
            return kept.resolve()
    return find_input(name, "the task family", config_file and config_file.parent).resolve()


def is_same_family(first: str, second: str, config_file: Path | None = None) -> bool:
    """Whether two names mean the same family; True if a file is missing."""
    if first == second or not (is_family_file(first) and is_family_file(second)):
        return first == second
    try:
        return find_family_file(first, config_file) == find_family_file(second, config_file)
    except ConfigError:  # the reader raises the error
        return True

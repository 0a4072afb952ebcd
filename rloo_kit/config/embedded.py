"""Names of the embedded models and of their task families: `embedded/thinking@sorting`, `embedded/sorting`.

A user's family is named by the path of its file. The run's folder keeps a copy under the same file name.
"""

from pathlib import Path

from rloo_kit.errors import ConfigError, excerpt

KINDS = ("thinking", "instruct", "untaught")  # untaught: a thinking model with random weights
FAMILIES = ("addition", "subtraction", "comparison", "sorting", "counting", "chain")  # modules of data/families
DEFAULT_FAMILY = "addition"
EMBEDDED_PREFIX = "embedded/"
KEPT_FAMILIES = "task_families"  # in the run's folder: copies of the user's family files


def split_model_name(name: str) -> tuple[str, str]:
    """Kind and family of an embedded model; the prefix is optional.

    >>> split_model_name("embedded/thinking@sorting"), split_model_name("instruct")
    (('thinking', 'sorting'), ('instruct', 'addition'))
    """
    kind, _, family = name.removeprefix(EMBEDDED_PREFIX).partition("@")
    return kind, family or DEFAULT_FAMILY


def is_family_file(family: str) -> bool:
    """Whether a family is named by the path of a user's file."""
    return family.endswith(".py")


def find_embedded_problem(name: str) -> str | None:
    """Why no embedded model has that name (prefix optional); None if one does. Files are not looked up.

    >>> find_embedded_problem("embedded/thinking@sortin")
    "there is no task family 'sortin': take addition, subtraction, comparison, sorting, counting, chain, or the path \
of your own .py file"
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
    """Absolute path of a user's family file: the run's copy if `config_file` is in a run's folder, else relative to the
    working directory, then to the folder of `config_file`. Raises ConfigError if there is none."""
    try:
        path = Path(name).expanduser()
        places = [Path.cwd() / path]
        if config_file is not None:
            kept = [config_file.parent / KEPT_FAMILIES / path.name] if config_file.name == "config.yaml" else []
            places = [*kept, *places, config_file.parent / path]
        looked = list(dict.fromkeys(place.resolve() for place in places))
        found = next((file for file in looked if file.is_file()), None)
    except (OSError, RuntimeError, ValueError) as error:  # name too long, unknown home folder, NUL
        raise ConfigError(f"the task family file {excerpt(name)} cannot be looked up: {error}") from None
    if found is None:
        raise ConfigError(f"there is no file {name} of a task family; looked for {' and '.join(map(str, looked))}")
    return found


def is_same_family(first: str, second: str, config_file: Path | None = None) -> bool:
    """Whether two names mean the same family; True if a file is missing."""
    if first == second or not (is_family_file(first) and is_family_file(second)):
        return first == second
    try:
        return find_family_file(first, config_file) == find_family_file(second, config_file)
    except ConfigError:  # the reader raises the error
        return True

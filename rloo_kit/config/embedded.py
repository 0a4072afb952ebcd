"""Names of the embedded models and of their task families: `embedded/thinking@sorting`, `embedded/sorting`.

A user's family is the path of its file. The folder of a run keeps a copy under the same file name.
"""

from pathlib import Path

from rloo_kit.errors import ConfigError, excerpt

KINDS = ("thinking", "instruct", "untaught")  # the last is a thinking model with random weights
FAMILIES = ("addition", "subtraction", "comparison", "sorting", "counting", "chain")  # modules of data/families
DEFAULT_FAMILY = "addition"
EMBEDDED_PREFIX = "embedded/"
KEPT_FAMILIES = "task_families"  # in the folder of a run: the files of the user's families that it began with


def split_model_name(name: str) -> tuple[str, str]:
    """Kind and family of an embedded model, whose name may have its prefix.

    >>> split_model_name("embedded/thinking@sorting"), split_model_name("instruct")
    (('thinking', 'sorting'), ('instruct', 'addition'))
    """
    kind, _, family = name.removeprefix(EMBEDDED_PREFIX).partition("@")
    return kind, family or DEFAULT_FAMILY


def is_family_file(family: str) -> bool:
    """Whether a family is named by the path of a user's file."""
    return family.endswith(".py")


def find_embedded_problem(name: str) -> str | None:
    """Why there is no embedded model of that name, prefix or not; None where there is one. Files are not looked for.

    >>> find_embedded_problem("embedded/thinking@sortin")
    "there is no task family 'sortin': take addition, subtraction, comparison, sorting, counting, chain, or the path \
of a .py file of your own"
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
    """Why there is no task family of that name; None where there is one. Files are not looked for."""
    if is_family_file(family) or family in FAMILIES:
        return None
    return f"there is no task family '{family}': take {', '.join(FAMILIES)}, or the path of a .py file of your own"


def find_family_file(name: str, config_file: Path | None = None) -> Path:
    """The file of a user's family, absolute: the copy that is kept where `config_file` is that of a run's folder, else
    from the working directory, then from the folder of `config_file`. ConfigError where there is none."""
    try:
        path = Path(name).expanduser()
        places = [Path.cwd() / path]
        if config_file is not None:
            kept = [config_file.parent / KEPT_FAMILIES / path.name] if config_file.name == "config.yaml" else []
            places = [*kept, *places, config_file.parent / path]
        looked = list(dict.fromkeys(place.resolve() for place in places))
        found = next((file for file in looked if file.is_file()), None)
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, another's home, a NUL
        raise ConfigError(f"the file {excerpt(name)} of a task family cannot be looked up: {error}") from None
    if found is None:
        raise ConfigError(
            f"there is no file {name} of a task family, looked for as {' and as '.join(map(str, looked))}"
        )
    return found


def is_same_family(first: str, second: str, config_file: Path | None = None) -> bool:
    """Whether two names are those of one family; a file that is not there may be any file's."""
    if first == second or not (is_family_file(first) and is_family_file(second)):
        return first == second
    try:
        return find_family_file(first, config_file) == find_family_file(second, config_file)
    except ConfigError:  # whoever reads it says so
        return True

"""Names of the embedded models and of their task families: `embedded/thinking@sorting`, `embedded/sorting`."""

KINDS = ("thinking", "instruct", "untaught")  # the last is a thinking model with random weights
FAMILIES = ("addition", "subtraction", "comparison", "sorting", "counting", "chain")  # modules of data/families
DEFAULT_FAMILY = "addition"
EMBEDDED_PREFIX = "embedded/"


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

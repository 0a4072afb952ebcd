"""Variables of a notebook: `read_parameters`."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rloo_kit.config.run import load_config
from rloo_kit.notebook.parameters import KNOWN, read_parameters
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import PATHS, ROOT, texts, values
from tests.fuzz.test_notebooks import CELLS
from tests.fuzz.test_overrides import override

CONFIG = str(ROOT / "configs" / "arithmetic_thinking.yaml")
cells = st.one_of(
    st.sampled_from([f"# Parameters\n{cell}" for cell in CELLS]),
    st.builds("# Parameters\n{} = 1".format, st.one_of(texts(), st.sampled_from([*KNOWN, "sed", "beta", "kl_coef"]))),
    st.builds("# Parameters{}\nconfig = 1\nseed = 1".format, texts()),
    texts(),
)
extra = st.one_of(
    st.fixed_dictionaries({}, optional={"In": st.one_of(st.lists(st.one_of(cells, values()), max_size=3), values())}),
    st.fixed_dictionaries({"__file__": st.one_of(st.sampled_from(PATHS), values())}),
)
paths = st.sampled_from(PATHS)
given_values = st.dictionaries(
    st.sampled_from([name for name in KNOWN if name != "config"]), st.one_of(values(), override, paths), max_size=3
)
config = st.one_of(st.just(CONFIG), st.just(CONFIG), st.just(CONFIG), paths, values())
cases = st.tuples(config, given_values, extra)


def attack(case: tuple[Any, dict[str, Any], dict[str, Any]], folder: Path) -> None:
    parameters = read_parameters({"config": case[0], **case[1], **case[2]})
    str(parameters)
    load_config(parameters.config, *parameters.overrides)


SURFACE = Surface("parameters", cases, attack)


def test_parameters_are_read_or_refused_in_words() -> None:
    """A notebook variable can be anything: an array, a long text, a function."""
    check(SURFACE)

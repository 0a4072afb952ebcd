"""RLOO's relatives by name: the page's rows are the keys of the table, load, and are named as what they are."""

import re
from pathlib import Path

import pytest
import yaml

from rloo_kit.config.checks import METHOD_DEFAULTS, METHODS, describe_method, name_method
from rloo_kit.config.run import load_config
from rloo_kit.config.schema import RLOOSection

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "arithmetic_thinking.yaml"


def rows_of_the_page() -> dict[str, list[str]]:
    """The overrides of each row of the table of methods in docs/config.md."""
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").split("## Methods\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    return {name.strip(): re.findall(r"`([\w.]+: [^`]+)`", keys) for name, keys in rows if name.strip() != "method"}


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_the_page_makes_the_method(method):
    """A table of settings that do not load, or that make another method, is worse than no table."""
    keys = dict(yaml.safe_load(row).popitem() for row in rows_of_the_page()[method])
    assert keys == METHODS[method]
    run = load_config(CONFIG, *(f"rloo.{row.replace(': ', '=')}" for row in rows_of_the_page()[method]))
    assert {name: getattr(run.rloo, name) for name in keys} == keys
    assert name_method(dict(run.rloo)) == method
    assert describe_method(dict(run.rloo)).startswith(f"{method} (")


def test_the_page_has_no_other_methods_and_rloo_is_the_default():
    """A row without an entry in the table is tested by nothing; RLOO is what a file without these keys trains."""
    assert list(rows_of_the_page()) == list(METHODS)
    assert {name: RLOOSection.model_fields[name].default for name in METHOD_DEFAULTS} == METHOD_DEFAULTS

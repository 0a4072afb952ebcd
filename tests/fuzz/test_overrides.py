"""Overrides of a run, `section.key=value`, and sections in Python: `load_config`."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig, load_config
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import DOCUMENTS, snippets, texts, values
from tests.fuzz.test_yaml import SMALL

SECTIONS = list(RunConfig.model_fields)
KEYS = [
    f"{section}.{key}"
    for section, field in RunConfig.model_fields.items()
    if hasattr(field.annotation, "model_fields")
    for key in field.annotation.model_fields  # type: ignore[union-attr]
]
ODD_KEYS = [
    "²", "rewards.²", "rewards.²=1", "rewards.٣.name", "rewards.99999999999.name", "rewards." + "9" * 5000 + ".name",
    "rewards.-1.name", "rewards.0", "rewards.0.name", "rewards.0.params.a.b", "rewards.00.name", "rewards.1_0.name",
    "rewards.0.params.0", "rewards.0.params", "rewards.name", "rewards", "0", "0.0", "run", "run.name.x", "--rloo.beta",
    "model.lora.r", "model.lora.target_modules.0", "model.lora.target_modules.7", "eval.pass_at_k.0",
    "eval.pass_at_k.1", "rloo.reward_clip_range.0", "rloo.reward_clip_range", "run." * 3000 + "x", "a" * 5000,
    "rloo.beta.", ".rloo.beta", "-", "rloo..beta", "rloo.generation_kwargs", "rloo.generation_kwargs.top_k",
    "rollout.server_url", "rewards.0.timeout_s", *[f"rloo.{name}" for name in CONFIG_NAMES], "reward_model",
    "rloo.reward_model", "rloo.policy", "rloo.seed",
]  # fmt: skip
parts = st.one_of(st.sampled_from(KEYS), st.sampled_from(ODD_KEYS), texts())
keys = st.one_of(
    parts, st.builds("{}.{}".format, st.sampled_from(SECTIONS), texts()), st.builds("{}.{}".format, parts, parts)
)
override = st.one_of(st.builds("{}={}".format, keys, st.one_of(snippets(), st.sampled_from(DOCUMENTS))), keys, texts())
cases = st.one_of(
    st.tuples(st.lists(override, min_size=1, max_size=2), st.just({})),
    st.tuples(st.just([]), st.dictionaries(st.sampled_from([*SECTIONS, "other"]), values(), max_size=1)),
    st.tuples(
        st.just([]),
        st.sampled_from(KEYS).flatmap(lambda key: st.builds(lambda value: _nested(key, value), values())),
    ),
)


def _nested(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.partition(".")
    return {section: {name: value}}


def attack(case: tuple[list[str], dict[str, Any]], folder: Path) -> None:
    file = folder / "run.yaml"
    file.write_text(SMALL)
    load_config(file, *case[0], **case[1]).to_yaml()


SURFACE = Surface("overrides", cases, attack)


def test_an_override_is_read_or_refused_in_words() -> None:
    """`²` passes `isdigit` but not `int`; any key can be mistyped."""
    check(SURFACE)

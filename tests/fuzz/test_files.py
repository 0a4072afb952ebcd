"""Files that people write: configs, overrides, `.env`, batch files, notebooks; and the harness itself."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from rloo_kit.batch.batch_file import load_batch, read_notebook
from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError
from rloo_kit.system.environment import load_env_file
from tests.fuzz import harness
from tests.fuzz.harness import Surface, check, count
from tests.fuzz.nasty import DOCUMENTS, ROOT, json_values, mutated_json, mutated_yaml, snippets, texts, values, yaml_of
from tests.notebooks.batch_notebooks import write_notebook

SMALL = """model: {name: embedded/thinking, max_seq_length: 128, lora: {r: 16, alpha: 16}}
data: {source: embedded/addition, max_prompt_length: 64}
rewards:
  - name: answer_reward
    weight: 1.0
    params: {scale: 2}
rloo:
  max_steps: 60
  learning_rate: 2e-3
  max_completion_length: 48
  reward_clip_range: [-1, 1]
  report_to: none
rollout: {engine: auto}
eval:
  pass_at_k: [1]
run:
  name: x
"""
OLD = """model: {name: embedded/thinking, max_seq_length: 128}
data: {source: embedded/addition, max_prompt_length: 64}
rewards: [{name: answer_reward}]
rloo:
  kl_coef: 0.0
  total_episodes: 100
  num_mini_batches: 1
  reward_clip_range: 10
  normalize_reward: true
  max_completion_length: 48
  non_eos_penalty: false
  stop_token: eos
  exp_name: x
  vf_coef: 0.1
"""
SHIPPED = yaml_of(ROOT / "configs", "[aq]*.yaml")[:3]


def read_config(case: bytes, folder: Path) -> None:
    (folder / "run.yaml").write_bytes(case)
    load_config(folder / "run.yaml").to_yaml()


SECTIONS = list(RunConfig.model_fields)
KEYS = [
    f"{section}.{key}"
    for section, field in RunConfig.model_fields.items()
    if hasattr(field.annotation, "model_fields")
    for key in field.annotation.model_fields  # type: ignore[union-attr]
]
ODD_KEYS = [
    "²", "rewards.²", "rewards.٣.name", "rewards.99999999999.name", "rewards." + "9" * 5000 + ".name",
    "rewards.-1.name", "rewards.0", "rewards.0.params.a.b", "rewards.1_0.name", "rewards.0.params.0",
    "rewards.name", "rewards", "0.0", "run", "run.name.x", "--rloo.beta", "model.lora.r", "model.lora.target_modules.7",
    "eval.pass_at_k.1",
    "rloo.reward_clip_range.0", "run." * 3000 + "x", "rloo.beta.", ".rloo.beta", "rloo..beta",
    "rloo.generation_kwargs.top_k", *[f"rloo.{name}" for name in CONFIG_NAMES], "reward_model", "rloo.policy",
]  # fmt: skip
key_parts = st.one_of(st.sampled_from(KEYS), st.sampled_from(ODD_KEYS), texts())
keys = st.one_of(
    key_parts,
    st.builds("{}.{}".format, st.sampled_from(SECTIONS), texts()),
    st.builds("{}.{}".format, key_parts, key_parts),
)
override = st.one_of(st.builds("{}={}".format, keys, st.one_of(snippets(), st.sampled_from(DOCUMENTS))), keys, texts())
one_key = st.builds(
    lambda key, value: {key.partition(".")[0]: {key.partition(".")[2]: value}}, st.sampled_from(KEYS), values()
)
overrides = st.one_of(
    st.tuples(st.lists(override, min_size=1, max_size=2), st.just({})),
    st.tuples(st.just([]), st.dictionaries(st.sampled_from([*SECTIONS, "other"]), values(), max_size=1)),
    st.tuples(st.just([]), one_key),
)


def override_config(case: tuple[list[str], dict[str, Any]], folder: Path) -> None:
    (folder / "run.yaml").write_text(SMALL)
    load_config(folder / "run.yaml", *case[0], **case[1]).to_yaml()


LINES = [
    "HF_TOKEN=", "HF_TOKEN", "export HF_TOKEN=x", "=x", "==", "A=B=C", "A='x", "A='\n'", "A=${B}\nB=${A}", "A=${" * 50,
    "A=$(ls)", "A=\0", "A\0=1", "A=\ud83d", "é=é", "A=\\", 'A="\\ud83d"', 'A="\\N{x}"', 'A="\\U99999999"', 'A="\\0"',
    "A=" + "x" * 200_000, "A" * 20_000 + "=1", "#", "A =1", "''=1", "A B=1", "A:1", "A=\x1b[2J", "A=1\rB=2",
    "\ufeffA=1",
]  # fmt: skip
env_line = st.one_of(st.sampled_from(LINES), texts(), st.builds("{}={}".format, texts(), texts()))
env_files = st.one_of(
    st.builds(
        lambda lines, encoding: "\n".join(lines).encode(encoding, "surrogatepass"),
        st.lists(env_line, max_size=4),
        st.sampled_from(["utf-8", "utf-16"]),
    ),
    st.binary(max_size=40),
)


def read_env_file(case: bytes, folder: Path) -> None:
    (folder / ".env").write_bytes(case)
    before = dict(os.environ)
    try:
        states, _ = load_env_file(folder / ".env")
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert not any(name == "" for name in states)


PLAIN = "# Parameters\nseed = 0\nsize: int = 3\nlabel = 'a'\n"
OF_THE_KIT = (
    f"# Parameters: plain values\nconfig = {str(ROOT / 'configs' / 'arithmetic_thinking.yaml')!r}\n"
    "num_generations = 8\nseed = 0\nrun_name = ''\noutput_dir = 'outputs'\noverrides = ''\n"
)
BATCHES = [
    """name: b
output_dir: outputs
notebook: plain.ipynb
timeout_s: 60
parameters: {seed: 3}
grid:
  seed: [0, 1]
  size: [2, 4]
runs:
  - name: one
    parameters: {seed: 7}
  - notebook: kit.ipynb
    parameters: {num_generations: 4}
"""
]
batch_keys = ["parameters.seed", "grid.seed", "grid.²", "runs.0.name", "runs.²", "timeout_s", "grid", "name"]
batch_override = st.one_of(st.builds("{}={}".format, st.sampled_from(batch_keys), snippets()), override)
batches = st.one_of(
    st.tuples(mutated_yaml(BATCHES), st.just([])),
    st.tuples(st.sampled_from(BATCHES).map(str.encode), batch_override.map(lambda one: [one])),
)


def read_batch(case: tuple[bytes, list[str]], folder: Path) -> None:
    (folder / "configs").mkdir()
    write_notebook(folder / "plain.ipynb", "print(seed)", parameters=PLAIN)
    write_notebook(folder / "kit.ipynb", "kit.read_parameters(globals())", parameters=OF_THE_KIT)
    (folder / "batch.yaml").write_bytes(case[0])
    load_batch(folder / "batch.yaml", *case[1])


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "x", "traceback": ["a", "b"]}
NOTEBOOK: dict[str, Any] = {
    "nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": {"name": "python3"}},
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "text"]},
        {"cell_type": "code", "execution_count": 1, "metadata": {"tags": ["parameters"]},
         "source": ["# Parameters\n", "seed = 0\n"], "outputs": []},
        {"cell_type": "code", "execution_count": 2, "metadata": {}, "source": "1/0", "outputs": [ERROR]},
    ],
}  # fmt: skip
CELLS = [
    "seed = ", "seed = \0", "seed = (" + "(" * 300 + ")" * 301, "seed = " + "-" * 3000 + "1", "seed = 0x" + "f" * 5000,
    "seed = {[]: 1}", "seed: int", "a.b = 1", "%matplotlib inline", "!ls", "seed = 1\n\tx = 2", "seed = '\ud83d'",
    "seed = 1 + 'a'", "é = 1", "a = b = c = 1", "[a, b] = 1, 2", "seed = [" * 1000 + "]" * 1000, "\ufeffseed = 1",
    "lambda: (yield)", "return", "# -*- coding: x -*-\nseed = 1", "seed = 1" + "+1" * 5000,
]  # fmt: skip
BROKEN = [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"cells":' * 50_000, b"\0" * 100, b"NaN",
    b'{"nbformat": 4, "cells": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"nbformat": ' + b"4" * 5000 + b', "cells": []}',
    b'{"nbformat": 4, "cells": [{"cell_type": "code", "metadata": ' + b"[" * 900 + b"]" * 900 + b"}]}",
]  # fmt: skip
good_notebooks = mutated_json(NOTEBOOK, st.one_of(json_values(), st.sampled_from(CELLS), texts()))
notebooks = st.integers(0, 9).flatmap(lambda chance: good_notebooks if chance else st.sampled_from(BROKEN))


def read_one_notebook(case: bytes, folder: Path) -> None:
    file = folder / "notebook.ipynb"
    file.write_bytes(case)
    notebook = read_notebook(file)
    assert all(isinstance(name, str) for name in notebook.declared)
    json.dumps(notebook.cell)


SURFACES = [
    Surface("YAML", mutated_yaml([SMALL, SMALL, OLD, *SHIPPED]), read_config),
    Surface("overrides", overrides, override_config),
    Surface("environment files", env_files, read_env_file),
    Surface("batch files", batches, read_batch),
    Surface("notebooks", notebooks, read_one_notebook),
]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_a_file_is_read_or_refused_in_words(surface: Surface) -> None:
    """`!!timestamp x` and a long hexadecimal number ended in tracebacks, and 316 bytes of aliases never ended; `²`
    passes `isdigit` but not `int`; a NUL in `.env` was os.environ's ValueError; `metadata: []` in one cell made a batch
    fail to read its notebook. A batch is started in the evening: a traceback costs the night."""
    check(surface)


def test_what_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that never finds a fault would print a table of zeros; a bomb of aliases raised nothing at all."""
    monkeypatch.setattr(harness, "HANGS_AFTER_S", 0.2)

    def refuse(text: str) -> None:
        raise ConfigError(text)

    for attack, refused, wrong in (
        (lambda case, folder: None, 0, []),
        (lambda case, folder: refuse("model.name is missing"), 4, []),
        (lambda case, folder: refuse(" "), 4, ["ConfigError without a message"]),
        (lambda case, folder: int("x"), 0, ["ValueError in the test"]),  # ConfigError is one: that is no refusal
        (lambda case, folder: time.sleep(60), 0, ["hangs: no end after 0.2 s"]),
    ):
        cases, found, failures = count(Surface("x", st.integers(0, 3), attack), 4)
        assert (cases, found, list(failures)) == (4, refused, wrong)

"""Files that people write: configs, overrides, batch files, rows; and the harness itself."""

import contextlib
import functools
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from rloo_kit.batch.batch_file import load_batch
from rloo_kit.config.old_names import CONFIG_NAMES
from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.errors import ConfigError
from tests.conftest import make_tiny_tokenizer
from tests.fuzz import harness
from tests.fuzz.harness import Surface, check, count
from tests.fuzz.nasty import DOCUMENTS, ROOT, json_values, mutated_yaml, snippets, texts, yaml_of
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
    lambda key, value: {key.partition(".")[0]: {key.partition(".")[2]: value}}, st.sampled_from(KEYS), json_values()
)
overrides = st.one_of(
    st.tuples(st.lists(override, min_size=1, max_size=2), st.just({})),
    st.tuples(st.just([]), st.dictionaries(st.sampled_from([*SECTIONS, "other"]), json_values(), max_size=1)),
    st.tuples(st.just([]), one_key),
)


def override_config(case: tuple[list[str], dict[str, Any]], folder: Path) -> None:
    (folder / "run.yaml").write_text(SMALL)
    load_config(folder / "run.yaml", *case[0], **case[1]).to_yaml()


PLAIN = "# Parameters\nseed = 0\nsize: int = 3\nlabel = 'a'\n"
BATCHES = [
    """name: b
output_dir: outputs
notebook: plain.ipynb
parameters: {seed: 3}
grid:
  seed: [0, 1]
  size: [2, 4]
runs:
  - {seed: 7}
""",
    """notebook: kit.ipynb
runs: [{num_generations: 4}]
""",
]
batch_keys = ["parameters.seed", "grid.seed", "grid.²", "runs.0.seed", "runs.²", "grid", "name"]
batch_override = st.one_of(st.builds("{}={}".format, st.sampled_from(batch_keys), snippets()), override)
batches = st.one_of(
    st.tuples(mutated_yaml(BATCHES), st.just([])),
    st.tuples(st.sampled_from(BATCHES).map(str.encode), batch_override.map(lambda one: [one])),
)


def read_batch(case: tuple[bytes, list[str]], folder: Path) -> None:
    write_notebook(folder / "plain.ipynb", "print(seed)", parameters=PLAIN)
    (folder / "batch.yaml").write_bytes(case[0])
    load_batch(folder / "batch.yaml", *case[1])


@functools.cache
def prepare() -> Any:
    """Load torch and TRL silently, so that nothing appears in the table of counts; returns a tiny tokenizer."""
    from rloo_kit._stack import load_stack

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        load_stack().datasets.disable_progress_bars()
        return make_tiny_tokenizer()


def load(
    source: str, folder: Path, rewards: Sequence[str] = ("length_reward",), sources: Any = None, **data: Any
) -> None:
    """`load_data` of a run with these keys of `data:`."""
    from rloo_kit.data.load import load_data

    run = RunConfig(
        model={"name": "my-model"},
        data={"test_size": 0} | ({"sources": sources} if sources else {"source": "unused"}),
        rewards=[{"name": name} for name in rewards],
        rloo={"max_steps": 1},
        run={"evaluate": False},
    )
    for key, value in (data if sources else {"source": source, **data}).items():
        setattr(run.data, key, value)  # as from a file: ConfigError where a key does not take it
    run._source = folder / "run.yaml"
    with contextlib.redirect_stdout(io.StringIO()):  # its notes
        found = load_data(run, prepare())
    assert len(found.train) and all(isinstance(row["prompt"], str) for row in found.train)


rewards = st.sampled_from([["length_reward"], ["answer_reward"], ["length_reward", "answer_reward"]])
LINES = [
    '{"prompt": "1+1=", "answer": "2"}', '{"prompt": "2+1=", "answer": 3, "level": 1}', "", " ", "{", "}", "[]", "null",
    "1", '"x"', "NaN", '{"prompt": NaN}', '{"prompt": "a", "answer": NaN}', '{"prompt": "a", "answer": Infinity}',
    "\ufeff", '{"prompt": "a", "answer": ' + "9" * 4000 + "}", '{"prompt": "a", "x": ' + "9" * 400 + "}",
    '{"prompt": "a", "x": 1e999}', '{"prompt": "a", "answer": ' + "9" * 6000 + "}", '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "\\ud83d"}', "[" * 20_000, '{"prompt": "a", "\\ud83d": 1}', '{"prompt": "\\u0000"}',
    '{"prompt": "a</think>"}', '{"prompt": "' + "x" * 50_000 + '"}',
    '{"prompt": "a", "x": ' + "[" * 500 + "]" * 500 + "}", '{"prompt": [{"role": "user", "content": "hi"}]}',
    "prompt,answer", '{"prompt": "a", "x": ' + '{"a":' * 300 + "1" + "}" * 300 + "}", "1+1=,2", "a,b,c", '"a\nb",1',
    '"unclosed', 'a"b,1', "\0,\0", "prompt,prompt", "prompt,", ",answer", "\udcff", "x" * 200_000, "\r", "\u2028",
    '{"prompt": "a"}{"prompt": "b"}', "'a',1",
]  # fmt: skip
json_row = st.builds(
    lambda given, ascii: json.dumps(given, ensure_ascii=ascii),
    st.dictionaries(st.sampled_from(["prompt", "answer", "x", "y", "prompts", "image"]), json_values(), max_size=3),
    st.booleans(),
)
line = st.one_of(st.sampled_from(LINES[:2] * 4 + LINES), json_row, st.lists(texts(), max_size=3).map(",".join))
content = st.builds(
    lambda lines, end, encoding: end.join(lines).encode(encoding, "surrogatepass" if "utf" in encoding else "replace"),
    st.lists(line, max_size=4),
    st.sampled_from(["\n", "\n", "\r\n", "\r"]),
    st.sampled_from(["utf-8"] * 8 + ["utf-8-sig", "utf-16", "latin-1"]),
)
csv_content = st.builds(bytes.__add__, st.sampled_from([b"", b"prompt,answer\n", b"prompt\n"]), content)
odd_bytes = st.sampled_from([b"", b"PAR1", b"PAR1" * 4, b"\0" * 50, b"PAR1\0\0\0\0\xff\xff\xff\x7fPAR1", b"\xff" * 9])
options = st.fixed_dictionaries(
    {},
    optional={
        "num_prompts": st.just(1),
        "prompt_column": st.sampled_from(["question", "x", "answer", " "]),
        "answer_column": st.sampled_from(["x", "prompt", "level"]),
        "answer_after": st.sampled_from(["####", "x", " "]),
        "system_prompt": st.sampled_from(["Be brief.", "<think>", "<|im_end|>", "\ud83d"]),
    },
)
files = st.one_of(
    st.tuples(st.just("rows.jsonl"), content),
    st.tuples(st.just("rows.csv"), csv_content),
    st.tuples(st.just("rows.parquet"), st.one_of(odd_bytes, content)),
)
Case = tuple[tuple[str, bytes], dict[str, Any], tuple[str, bytes] | None, str, list[str]]


def load_file(case: Case, folder: Path) -> None:
    """One file, or a second one that is mixed in or is the test source."""
    (name, given), keys, second, use, names = case
    (folder / name).write_bytes(given)
    source = str(folder / name)
    if second is None:
        load(source, folder, rewards=names, **keys)
        return
    other = folder / f"other_{second[0]}"
    other.write_bytes(second[1])
    if use == "test":
        load(source, folder, rewards=names, test_source=str(other), **keys)
    else:
        mix = [{"source": source, "weight": 2}, {"source": str(other), "prompt_column": "x"}]
        load("", folder, rewards=names, sources=mix, **keys)


SURFACES = [
    Surface("YAML", mutated_yaml([SMALL, SMALL, OLD, *SHIPPED]), read_config),
    Surface("overrides", overrides, override_config),
    Surface("batch files", batches, read_batch),
    Surface(
        "row files",
        st.tuples(files, options, st.one_of(st.none(), st.none(), files), st.sampled_from(["mix", "test"]), rewards),
        load_file,
        prepare,
    ),
]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_a_file_is_read_or_refused_in_words(surface: Surface) -> None:
    """`!!timestamp x` and a long hexadecimal number ended in tracebacks, and 316 bytes of aliases never ended; `²`
    passes `isdigit` but not `int`. Rows have cut lines, columns that change their type, and bytes in another
    encoding. A batch is started in the evening: a traceback costs the night."""
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

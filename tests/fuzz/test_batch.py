"""YAML of a batch: `load_batch`, with the notebooks and runs that it names."""

from pathlib import Path

from hypothesis import strategies as st

from rloo_kit.batch.file import load_batch
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import ROOT, mutated_yaml, snippets
from tests.fuzz.test_overrides import override
from tests.notebooks.batch_notebooks import write_notebook

PLAIN = "# Parameters\nseed = 0\nsize: int = 3\nlabel = 'a'\n"
KIT = (
    f"# Parameters: plain values\nconfig = {str(ROOT / 'configs' / 'arithmetic_thinking.yaml')!r}\n"
    "num_generations = 8\nseed = 0\nrun_name = ''\noutput_dir = 'outputs'\noverrides = ''\n"
)
GOOD = """name: b
output_dir: outputs
notebook: plain.ipynb
jobs: 2
timeout_s: 60
parameters:
  seed: 3
grid:
  seed: [0, 1]
  size: [2, 4]
runs:
  - name: one
    parameters: {seed: 7}
  - notebook: kit.ipynb
    timeout_s: 1.5
    parameters: {num_generations: 4}
"""
OF_THE_KIT = """notebook: kit.ipynb
parameters:
  max_steps: 3
  overrides: rloo.beta=0.1
grid:
  num_generations: [2, 4]
  seed: [0]
"""
named = st.sampled_from(
    ["parameters.seed", "grid.seed", "grid.²", "runs.0.name", "runs.²", "jobs", "timeout_s", "grid", "name"]
)
overrides = st.lists(st.one_of(st.builds("{}={}".format, named, snippets()), override), min_size=1, max_size=1)
goods = [GOOD, OF_THE_KIT]
cases = st.one_of(
    st.tuples(mutated_yaml(goods), st.just([])),
    st.tuples(st.sampled_from(goods).map(str.encode), overrides),
)


def attack(case: tuple[bytes, list[str]], folder: Path) -> None:
    (folder / "configs").mkdir()
    write_notebook(folder / "plain.ipynb", "print(seed)", parameters=PLAIN)
    write_notebook(folder / "kit.ipynb", "kit.read_parameters(globals())", parameters=KIT)
    file = folder / "batch.yaml"
    file.write_bytes(case[0])
    batch = load_batch(file, *case[1])
    batch.varying()
    batch.to_yaml()


SURFACE = Surface("batch files", cases, attack)


def test_a_batch_file_is_read_or_refused_in_words() -> None:
    """A batch is started in the evening; a traceback instead of the faulty key costs the night."""
    check(SURFACE)

"""Launch files of accelerate, `--launch FILE`, and environment files, `.env`."""

from pathlib import Path

from hypothesis import strategies as st

from rloo_kit.system.processes import read_launch_file
from tests.fuzz.harness import Surface, check
from tests.fuzz.nasty import ROOT, mutated_yaml, without_comments

GOOD = [without_comments(path) for path in sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))]
cases = st.tuples(mutated_yaml(GOOD), st.sampled_from([None, None, 2]))


def attack(case: tuple[bytes, int | None], folder: Path) -> None:
    file = folder / "launch.yaml"
    file.write_bytes(case[0])
    read_launch_file(file, case[1])


SURFACE = Surface("launch files", cases, attack)


def test_a_launch_file_is_read_or_refused_in_words() -> None:
    """`num_machines: x` reached int(), and a bomb of aliases accelerate's own reader."""
    check(SURFACE)

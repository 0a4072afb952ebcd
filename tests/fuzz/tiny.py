"""The tokenizer and run shared by the data surfaces; the same tiny tokenizer as in the fixtures."""

import contextlib
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import make_tiny_tokenizer


@functools.cache
def tokenizer() -> Any:
    """A shared tokenizer for all cases."""
    return make_tiny_tokenizer()


@functools.cache
def prepare() -> None:
    """Load torch and TRL silently, so that nothing appears in the table of counts; disables the progress bars of
    `datasets`."""
    from rloo_kit._stack import load_stack

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        load_stack().datasets.disable_progress_bars()
        tokenizer()


def load(
    source: str, folder: Path, rows: Any = None, rewards: Sequence[str] = ("length_reward",), sources: Any = None,
    **data: Any,
) -> None:  # fmt: skip
    """`load_data` of a run with these keys of `data:`."""
    from rloo_kit.config.run import RunConfig
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
        found = load_data(run, tokenizer(), rows=rows)
    assert len(found.train) and all(isinstance(row["prompt"], str) for row in found.train)

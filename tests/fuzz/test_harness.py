"""The harness itself: what counts as a failure."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from rloo_kit.errors import ConfigError
from tests.fuzz import harness
from tests.fuzz.harness import Surface, check, count, judge


def surface(attack: Any) -> Surface:
    return Surface("x", st.integers(0, 3), lambda case, folder: attack(case))


def refuse(text: str) -> Any:
    def attack(case: int) -> None:
        raise ConfigError(text)

    return attack


@pytest.mark.parametrize(
    ("attack", "refused", "wrong"),
    [
        (lambda case: None, False, None),
        (refuse("model.name is missing"), True, None),
        (lambda case: {}[case], False, "KeyError"),
        (lambda case: int("x"), False, "ValueError"),  # ConfigError is one, which does not make it a refusal
        (refuse(" "), True, "without a message"),
    ],
)
def test_what_counts_as_a_failure(attack: Any, refused: bool, wrong: str | None, tmp_path: Path) -> None:
    """A harness that never finds a fault would print a table of zeros."""
    found = judge(surface(attack), 1, tmp_path)
    assert found[0] == refused and (found[1] is None) == (wrong is None) and (wrong or "") in (found[1] or "")
    tally = count(surface(attack), 4)
    assert tally.cases == 4 and tally.refused == 4 * refused
    assert (tally.tracebacks, tally.unclear) == ((4, 0) if wrong and not refused else (0, 4 if wrong else 0))
    if wrong:
        with pytest.raises(pytest.fail.Exception, match="with "):
            check(surface(attack))


def test_a_case_that_does_not_end_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bomb of YAML aliases raised nothing at all."""
    monkeypatch.setattr(harness, "HANGS_AFTER_S", 0.2)
    assert "hangs" in str(judge(surface(lambda case: time.sleep(60)), 1, tmp_path)[1])

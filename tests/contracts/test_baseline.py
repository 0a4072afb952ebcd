"""The frozen baseline still compares: its quickest parts."""

import subprocess
import sys
from pathlib import Path


def test_names_help_and_keys_are_a_superset_of_the_frozen_ones(repository: Path) -> None:
    """A renamed function, a dropped option or a changed default breaks code that worked yesterday."""
    command = [sys.executable, "tests/baseline.py", "compare", "--only", "names", "help", "config"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

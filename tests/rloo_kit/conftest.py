"""A fresh process for what has to be seen from the first import on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_fresh(tmp_path: Path, repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_fresh(code, cards=None, hide_unsloth=True, **variables)` runs code in a process of its own.

    Its working folder `tmp_path/work` is an empty project, its home `tmp_path/home`, and `tmp_path/site` comes first
    on the path: torch is a CUDA build there, and a test may add modules. `cards` go to the faked driver; an installed
    Unsloth is hidden unless the test brings its own. Variables are the whole environment besides.
    """
    site, work = tmp_path / "site", tmp_path / "work"
    metadata = site / "torch-2.13.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (work / "configs").mkdir(parents=True)
    path = [str(site), str(Path(__file__).parent / "fake_driver"), str(repository)]
    base = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    base |= {"PYTHONPATH": os.pathsep.join(path), "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    base |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def start(
        code: str, cards: list[dict] | None = None, hide_unsloth: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        env = base | ({} if cards is None else {"FAKE_CARDS": json.dumps(cards)}) | variables
        head = "import os, sys\n" + ("sys.modules['unsloth'] = None\n" if hide_unsloth else "") + "import rloo_kit\n"
        command = [sys.executable, "-c", head + code]
        return subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, timeout=120)

    return start

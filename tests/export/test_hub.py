"""`--push`: the hub's own client against a hub on this machine, in a separate process (it reads HF_ENDPOINT once)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.export.hub_stand_in import Hub

TOKEN = "hf_a_token_that_nobody_may_read"


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(TOKEN)
    yield found
    found.close()


def push(run: Path, hub: Hub, folder: Path, token: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """`rloo-kit export --push` with the token in .env alone."""
    (tmp_path / ".env").write_text(f"HF_TOKEN={token}\n")
    left_out = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_DATASETS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    kept |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    kept |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = ["export", str(run), "--to", "gguf", "--output", str(folder), "--push", "someone/sums", "--prompts", "2"]
    return subprocess.run(
        [sys.executable, "-m", "rloo_kit.cli", *words],
        env=kept,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_the_folder_is_pushed_whole_with_the_token_of_the_env_file(
    embedded_run: Path, hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    done = push(embedded_run, hub, folder, TOKEN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.created == ["someone/sums"] and f"pushed: {hub.url}/someone/sums" in done.stdout
    wanted = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert hub.files == wanted and {"README.md", "certificate.json", "Modelfile"} < wanted.keys()
    sent = b"".join(hub.files.values())
    assert TOKEN.encode() not in sent and TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_refused_push_leaves_the_export_and_says_how_to_go_on(embedded_run: Path, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = push(embedded_run, hub, folder, "hf_of_somebody_else", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"the export is complete in {folder}, but --push someone/sums failed" in done.stderr
    assert "HF_TOKEN" in done.stderr and f"hf upload someone/sums {folder}" in done.stderr
    assert "hf_of_somebody_else" not in done.stdout + done.stderr and (folder / "certificate.json").is_file()
    assert hub.files == {}

"""`--push`: what the hub's client is asked for, and what a refused push leaves."""

from pathlib import Path
from typing import Any

import pytest

from rloo_kit.errors import ExportError
from rloo_kit.export.export import push_folder


class Hub:
    """In place of the hub's client; `refused` is the error of its upload."""

    asked: list[tuple[str, Any]]
    refused: Exception | None = None

    def create_repo(self, repo: str, exist_ok: bool) -> str:
        self.asked.append((repo, exist_ok))
        return f"https://hub/{repo}"

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.asked.append((repo_id, (folder_path, commit_message)))
        if self.refused is not None:
            raise self.refused


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    monkeypatch.setattr("rloo_kit.export.export.HfApi", Hub)
    return Hub


def test_the_folder_is_pushed_in_one_commit(hub: type[Hub], tmp_path: Path) -> None:
    assert push_folder(tmp_path, "someone/sums", "sums: gguf") == "https://hub/someone/sums"
    assert hub.asked == [("someone/sums", True), ("someone/sums", (tmp_path, "sums: gguf"))]


@pytest.mark.parametrize("error", [ValueError("Invalid user token."), OSError("Network is unreachable")])
def test_a_refused_push_leaves_the_export_and_says_how_to_go_on(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(hub, "refused", error)
    with pytest.raises(ExportError, match=r"complete in .*HF_TOKEN.*hf upload someone/sums ") as caught:
        push_folder(tmp_path, "someone/sums", "sums: gguf")
    assert str(error) in str(caught.value) and caught.value.__suppress_context__

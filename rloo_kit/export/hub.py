"""Upload an exported folder to the hub with the hub's own client, which finds the token itself."""

import shlex
from pathlib import Path

from rloo_kit.errors import ExportError


def push_folder(folder: Path, repo: str, message: str) -> str:
    """Create the repository if it does not exist, and upload the folder in one commit.

    Args:
        repo: OWNER/NAME. message: of the commit.

    Returns:
        the address of the repository.

    Raises:
        ExportError: refused or unreachable; the folder stays in place.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    try:
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled, ValueError, OSError) as error:
        raise ExportError(
            f"the export is complete in {folder}, but --push {repo} failed ({type(error).__name__}): {error}. A token "
            "with write access is read from HF_TOKEN, in the environment or in .env; HF_HUB_OFFLINE must not be 1. "
            f"Retry: hf upload {repo} {shlex.quote(str(folder))}"
        ) from None
    return str(address)

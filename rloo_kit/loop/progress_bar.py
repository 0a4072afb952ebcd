"""Progress of a trainer as text, in a notebook too."""

import os
import sys
from typing import Any

from transformers import ProgressCallback

from rloo_kit.system.console import VARIABLE


def use_text_progress(trainer: Any) -> None:
    """Replace a trainer's HTML table in a notebook with a text bar, unless it is off or `TQDM_NOTEBOOK=true`."""
    notebook = sys.modules.get("transformers.utils.notebook")  # loaded if the trainer detected a notebook
    if notebook is None or os.environ.get(VARIABLE) == "true":
        return
    if trainer.pop_callback(notebook.NotebookProgressCallback) is not None:
        trainer.add_callback(ProgressCallback)

"""Fingerprints of the TRL methods that our trainer stands in for or leans on.

When one of them changes, ours may have to change with it. Read what moved, adapt `rloo_kit/loop/` if need be, let
`test_equality_with_stock.py` pass, and then write down the new fingerprint.
"""

import ast
import hashlib
import inspect
import textwrap
from pathlib import Path

import pytest

STOOD_IN_FOR = {
    "_generate_and_score_completions": "305e4f754722",
    "_compute_loss": "786faa03f5e7",
    "_generate_single_turn": "c68cc95ac91c",
    "_prepare_inputs": "b6f38f7a05aa",
    "log": "777a11a6b926",
}
LEANED_ON = {
    "__init__": "77e9c1916fd3",
    "_calculate_rewards": "bf97e1294896",
    "_generate": "a63e2a443c7d",
    "_save_checkpoint": "9e443b9bdf40",
    "training_step": "96c133253ca1",
    "prediction_step": "b62f3bb0d975",
    "_get_train_sampler": "1b25d1c0176a",
    "get_eval_dataloader": "aace8e5c13fa",
}


def fingerprint(function) -> str:
    """A hash of what the code does: comments, docstrings and layout do not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", [*STOOD_IN_FOR, *LEANED_ON])
def test_trl_method_is_the_one_that_was_read(name):
    """TRL 1.13 moved scoring into Triton kernels overnight; a subclass would have gone on with half of the old loop."""
    from trl import RLOOTrainer

    found = fingerprint(getattr(RLOOTrainer, name))
    expected = (STOOD_IN_FOR | LEANED_ON)[name]
    assert found == expected, f"trl.RLOOTrainer.{name} changed: {found}, written down {expected}"


def test_the_page_has_what_stock_trl_says_without_a_gpu(tmp_path):
    """Troubleshooting had Triton's message alone, and a CPU build of torch comes without Triton."""
    import torch
    import trl
    from trl.trainer import utils

    if torch.cuda.is_available():
        pytest.skip("this process sees a GPU")
    page = (Path(__file__).resolve().parents[2] / "references" / "troubleshooting.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="bf16/gpu") as refused:
        trl.RLOOConfig(output_dir=str(tmp_path))
    assert f"`{str(refused.value).split('.')[0]}`" in page
    if utils._ChunkedLogProbFunction is None:
        with pytest.raises(AttributeError) as failed:
            utils._ChunkedLogProbFunction.apply()
        assert f"`{failed.value}`" in page

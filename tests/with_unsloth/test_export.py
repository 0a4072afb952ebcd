"""A policy that Unsloth loaded, exported: merged from the weights that it computes with, and checked by transformers
without Unsloth."""

import json
from pathlib import Path
from typing import Any

from tests.with_unsloth import interpreter
from tests.with_unsloth.conftest import move_adapter


def test_a_policy_of_unsloth_is_exported_as_it_computes(make_run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Unsloth's merge takes 16-bit weights that the adapter was not trained on; the kit merges what is in the model."""
    import rloo_kit as kit
    from rloo_kit.export import export as exporting

    def load_on_cpu(run: Any) -> Any:
        interpreter.keep_on_cpu()  # before every load
        return kit.load_policy(run)

    monkeypatch.setattr(exporting, "load_policy", load_on_cpu)
    interpreter.keep_on_cpu()
    run = make_run(f"run.output_dir={tmp_path}", "run.name=sums")
    policy = kit.load_policy(run)
    assert policy.backend == "unsloth"
    move_adapter(policy.model)
    kit.save_adapter(policy, run.folder / "adapter")
    (run.folder / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
    found = kit.export_model(run.folder, "merged", num_prompts=2)
    [check] = found.certificate["checks"]
    assert found.kind == "float32" and check["loader"] == "transformers" and check["equal"] == 2
    assert check["largest"] < 1e-4 and json.loads((found.folder / "config.json").read_text())["model_type"] == "qwen3"

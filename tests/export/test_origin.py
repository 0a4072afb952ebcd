"""Where an export says it comes from, and what is loaded of it: decided by files alone, so no weights are written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig, load_config
from rloo_kit.demo.embedded import build, name_built
from rloo_kit.errors import ConfigError
from rloo_kit.export.export import find_base
from rloo_kit.models.policy import trained_run
from rloo_kit.runs.find import RUN_FILE, describe_origin, origin_of

RUN = """
run: {{name: sums}}
model: {{name: {model}, max_seq_length: 96, dtype: float32}}
data: {{source: {data}, max_prompt_length: 32, system_prompt: Be brief.}}
rewards: [{{name: answer_reward}}]
rloo: {{max_steps: 1, max_completion_length: 40}}
"""


def make_export(place: Path, run: RunConfig, base: str, target: str) -> Path:
    """What an export of that target leaves in `place`, without the weights."""
    place.mkdir(parents=True)
    names = {"adapter": "adapter_config.json", "merged": "config.json", "gguf": "sums-f16.gguf"}
    (place / names[target]).write_text(json.dumps({"base_model_name_or_path": base}))
    (place / RUN_FILE).write_text(describe_origin(run, find_base(run, base)))
    return place


def write_run(folder: Path, model: str = "embedded/thinking", data: str = "sums.jsonl") -> Any:
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model}))
    (folder / "config.yaml").write_text(RUN.format(model=model, data=data))
    return load_config(folder / "config.yaml")


def write_model(folder: Path, **values: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256} | values))
    return str(folder)


def test_a_checkpoint_that_is_quantised_itself_keeps_its_adapter(tmp_path: Path) -> None:
    """Anybody's folder; without an adapter its weights are refused, because nothing could be trained."""
    folder = write_model(tmp_path / "theirs", quantization_config={"load_in_4bit": True})
    assert trained_run(folder).model.lora is not None
    assert trained_run(write_model(tmp_path / "plain")).model.lora is None


@pytest.mark.parametrize("target", ["adapter", "merged"])
def test_in_the_runs_folder_the_base_is_where_the_run_has_it(tmp_path: Path, target: str) -> None:
    """An export names no path of a machine, so even next to its run it was sent to the hub for "mymodel"."""
    base = write_model(tmp_path / "models" / "mymodel")
    run = write_run(tmp_path / "outputs" / "sums", base)
    made = make_export(tmp_path / "outputs" / "sums" / "export" / target, run, base, target)
    assert origin_of(made).model.name == base
    assert origin_of(made, "model.name=other/model").model.name == "other/model"
    moved = made.rename(tmp_path / "moved")
    assert origin_of(moved).model.name == "mymodel" and str(tmp_path) not in (moved / RUN_FILE).read_text()


def test_an_embedded_base_is_called_by_its_name(tmp_path: Path) -> None:
    """Trained on a user's file, or on from another adapter: neither could be read back."""
    base = str(build("thinking"))
    assert name_built(Path(base).name) == {"name": "embedded/thinking", "vocabulary": "compact", "build_seed": 0}
    assert name_built("mymodel") is None
    first = write_run(tmp_path / "outputs" / "first")
    second = write_run(tmp_path / "outputs" / "second", str(tmp_path / "outputs" / "first" / "adapter"))
    for name, run in (("a", first), ("b", second)):
        found = origin_of(make_export(tmp_path / name, run, base, "adapter"))
        assert found.model.name == "embedded/thinking" and found.rloo.max_completion_length == 40
        assert found.data.system_prompt == "Be brief."


def test_a_folder_is_known_from_inside_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ask checkpoint-60` in `checkpoints/` took the defaults of any model, without a word."""
    run = write_run(tmp_path / "sums")
    checkpoint = tmp_path / "sums" / "checkpoints" / "checkpoint-60"
    shutil.copytree(tmp_path / "sums" / "adapter", checkpoint)
    monkeypatch.chdir(checkpoint.parent)
    for source in ("checkpoint-60", "./checkpoint-60/"):
        assert origin_of(source).rloo.max_completion_length == run.rloo.max_completion_length
    monkeypatch.chdir(tmp_path / "sums" / "adapter")
    assert origin_of(".").data.system_prompt == "Be brief."


def test_a_gguf_file_is_no_policy(tmp_path: Path) -> None:
    """It loaded an adapter that happened to lie in the working directory under the run's name."""
    run = write_run(tmp_path / "outputs" / "sums")
    folder = make_export(tmp_path / "gguf", run, "base", "gguf")
    for source in (folder, folder / "sums-f16.gguf"):
        with pytest.raises(ConfigError, match="llama-cli -m .*sums-f16.gguf.*ollama create NAME -f Modelfile"):
            trained_run(source)

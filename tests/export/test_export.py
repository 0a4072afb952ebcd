"""Whole exports: loaded by the programs that they are for, certified, published or refused; vLLM: `with_vllm/`."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import transformers
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

import rloo_kit as kit
from rloo_kit.cli import app
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError, ExportError, RunExistsError
from rloo_kit.export import export as exporting
from rloo_kit.export import parity
from rloo_kit.export.formats import WRITERS, serve_line, write_card
from rloo_kit.models.policy import Policy
from rloo_kit.results.evaluation import Evaluation
from rloo_kit.runs.find import find_run
from rloo_kit.think_tags import ThinkTags
from tests.evaluations import around

SWITCH = " --default-chat-template-kwargs"


@pytest.mark.parametrize(("prompts", "least"), [(1, 0), (3, 2), (20, 19)])
def test_the_share_of_equal_texts_is_one_of_whole_prompts(prompts: int, least: int) -> None:
    """With three prompts one near-tie failed an export."""
    close = parity.Parity("peft", "0", "float32", "float32", prompts, 9, 0.0, 0.0, least, 0, parity.OF_FILE["float32"])
    assert not close.problems and (not least or replace(close, equal=least - 1).problems)


def certified(found: Any, prompts: int) -> dict[str, Any]:
    """The one check of a certificate that says that its loader was asked."""
    record = json.loads((found.folder / "certificate.json").read_text())
    assert record == found.certificate | {"files": record["files"]} and record["verdict"] == "checked"
    [check] = record["checks"]
    assert check["prompts"] == prompts and check["loader"] == record["loader"] and check["unseen"] == 0
    assert check["largest"] <= check["limits"]["largest"] and check["tokens"] >= prompts
    return check


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports that no program loads, which takes seconds; their certificates say so."""
    monkeypatch.setattr(exporting, "find_missing", lambda loader: "left out")


@pytest.fixture(scope="module")
def exported(embedded_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The merged and the adapter's export of the embedded run; a test that moves a folder copies it."""
    folder = tmp_path_factory.mktemp("exported")
    return {to: kit.export_model(embedded_run, to, output=folder / to, num_prompts=6) for to in ("merged", "adapter")}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["merged", "adapter"])
def test_the_embedded_model_is_what_was_trained(
    embedded_run: Path, exported: dict[str, Any], tmp_path: Path, to: str
) -> None:
    """Token by token; and where somebody else downloads it there is no run, no cache folder, only what was exported."""
    check = certified(exported[to], 6)
    assert check["largest"] < 1e-4 and check["equal"] == 6
    moved = Path(shutil.copytree(exported[to].folder, tmp_path / "elsewhere"))
    text = (moved / "rloo_kit.yaml").read_text()
    assert str(tmp_path.anchor + "tmp") not in text and "outputs" not in text, "nothing of this machine"
    loaded = (kit.load_trained(place) for place in (embedded_run, moved))
    answers = [kit.ask(*policy, "58+67=", temperature=0) for policy in loaded]
    assert vars(answers[1]) | {"seconds": 0} == vars(answers[0]) | {"seconds": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most", "same"), [("f32", 1e-4, 6), ("q8_0", 0.2, 4)])
def test_llama_cpp_answers_as_the_embedded_model(
    embedded_run: Path, tmp_path: Path, kind: str, most: float, same: int
) -> None:
    """8 bits: 0.005 to 0.115 nats and 5 or 6 equal texts, by the processor that built the embedded model."""
    made = kit.export_model(embedded_run, "gguf", output=tmp_path / "x", num_prompts=6, quantization=kind)
    check = certified(made, 6)
    assert check["largest"] < most and check["equal"] >= same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "options"), [("merged", {}), pytest.param("gguf", {"quantization": "f32"}, marks=pytest.mark.long)]
)
def test_the_true_vocabulary_with_merges(wide_run: Path, tmp_path: Path, to: str, options: dict[str, str]) -> None:
    """151,936 rows, digits, umlauts and tabs: llama.cpp splits texts by its own rule, which has to equal Qwen3's."""
    found = kit.export_model(wide_run, to, output=tmp_path / "out", **options)
    check = certified(found, 8)
    assert (found.kind, check["holds"]) == (("bfloat16",) * 2 if to == "merged" else ("f32", "float32"))
    assert to == "merged" or (check["largest"] < 1e-4 and check["equal"] == 8)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["merged", "adapter"])
def test_a_4bit_base(make_run: Callable[..., Path], tmp_path: Path, to: str) -> None:
    """Merged into the 16-bit weights that it was quantised from, the model was another one: 0.116 nats off."""
    run = make_run("four", "model.load_in_4bit=true")
    found = kit.export_model(run, to, output=tmp_path / "out", num_prompts=4)
    check = certified(found, 4)
    assert check["largest"] < 2e-5 and check["equal"] == 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "in 4-bit" in card and ("BitsAndBytesConfig" in card) is (to == "adapter")
    if to == "merged":
        assert "quantization_config" not in (found.folder / "config.json").read_text()
        trained, merged = (kit.load_trained(folder) for folder in (run, found.folder))
        answers = [kit.ask(*one, "58+67=", temperature=0).answer for one in (trained, merged)]
        assert answers[0] == answers[1] and "4-bit" not in merged[1].describe(), "quantised again it answers otherwise"
        with pytest.raises(ConfigError, match="no separate base"):  # it was the trained model, called the base
            kit.ask(*merged, "58+67=", base=True)


@pytest.mark.slow
def test_another_run_of_the_same_file_is_its_own(make_run: Callable[..., Path], unchecked: None) -> None:
    """The weights of one run were published in the folder of the other, under its name and with its figures."""
    first, second = make_run("first"), make_run("second", scale=0.03)
    second = second.rename(first.parent / "second")
    folder = kit.export_model(first / "config.yaml", "adapter", "run.name=second", num_prompts=2).folder
    assert folder == second / "export" / "adapter" and "# second" in (folder / "README.md").read_text()
    weights = "adapter_model.safetensors"
    assert (folder / weights).read_bytes() == (second / "adapter" / weights).read_bytes()
    assert not (first / "export").exists()


@pytest.mark.slow
def test_a_run_without_an_adapter_is_exported_merged(
    make_run: Callable[..., Path], tmp_path: Path, unchecked: None
) -> None:
    run = make_run("whole", "model.lora=null")
    with pytest.raises(ExportError, match=r"whole model \(model\.lora is null\): use --to merged"):
        kit.export_model(run, "adapter", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = kit.export_model(run, "merged", output=tmp_path / "out", num_prompts=2)
    saved, written = (load_file(folder / "model.safetensors") for folder in (run / "adapter", found.folder))
    assert saved.keys() == written.keys() and all(written[name].equal(value) for name, value in saved.items())
    assert "embedded/thinking after" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_the_snippet_of_the_adapters_card_runs(exported: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's file named the base by a folder of the machine that trained it, so no other machine could load it."""
    place = Path(shutil.copytree(exported["adapter"].folder, tmp_path / "moved"))
    code = (place / "README.md").read_text().split("```python\n")[1].split("```")[0]
    check = "print(type(model).__name__, model.peft_config['default'].base_model_name_or_path, len(tokenizer))"
    done = subprocess.run([sys.executable, "-c", code + check], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["PeftModelForCausalLM", "thinking-compact-0-r2", "261"], done.stderr


def change_weight(file: Path) -> None:
    tensor = next(x for x in gguf.GGUFReader(file, "r+").tensors if x.name == "output_norm.weight")
    tensor.data[3] += 2.0
    tensor.data.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_weight, r"differs by [\d.]+ nats \(limit [\d.]+\).*Nothing was published"),
        (lambda file: os.truncate(file, 5000), r"llama\.cpp does not load the export \(exit code -?\d+\)"),
    ],
)
def test_a_tampered_export_is_refused(
    embedded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    """One weight changed after the read-back shows; a GGUF that llama.cpp cannot read must not end the export."""

    def tamper(job: Any) -> Any:
        written = WRITERS["gguf"](job)
        damage(written.model)
        return written

    monkeypatch.setattr(exporting, "WRITERS", {"gguf": tamper})
    with pytest.raises(ExportError, match=message):
        kit.export_model(embedded_run, "gguf", output=tmp_path / "out", num_prompts=2, quantization="f32")
    assert list(tmp_path.iterdir()) == [], "neither the export nor its staging folder is left"


@pytest.mark.slow
def test_what_could_not_be_checked_is_not_called_checked(
    embedded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without llama.cpp the tensors are read back, and the certificate, the card and the lines say that this is all."""
    monkeypatch.setattr(parity, "is_importable", lambda name: False)
    found = kit.export_model(embedded_run, "gguf", output=tmp_path / "out", num_prompts=2, quantization="bf16")
    record = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert record["verdict"] == "not checked" and record["checks"] == []
    assert "xllamacpp is not installed (pip install xllamacpp)" in record["why_not"]
    line = f"NOT CHECKED with llama.cpp: {record['why_not']}"
    assert line in str(found) and line in (tmp_path / "out" / "README.md").read_text()
    assert "35 tensors read back" in str(found) and "checked with" not in str(found)


@pytest.mark.slow
def test_the_command_publishes_once_and_says_what_it_did(make_run: Callable[..., Path], unchecked: None) -> None:
    """`rloo-kit export RUN`: the folder, the certificate's line, JSON; a second time only with --overwrite."""
    run = make_run("once")
    (run / "status.json").write_text(json.dumps({"run": "a1", "state": "finished", "step": 60, "adapter_step": 40}))
    words = ["export", str(run), "--to", "vllm", "--prompts", "2", "--dtype", "bfloat16"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    folder = run / "export" / "vllm"
    assert record["folder"] == str(folder) and record["kind"] == "bfloat16"
    assert f"vllm serve {folder} --max-model-len 128 --reasoning-parser qwen3" in done.stdout
    assert record["certificate"]["run"] == {"id": "a1", "state": "finished", "weights_of_step": 40}
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "replace it with --overwrite" in again.output
    (folder / "old").write_text("")
    assert CliRunner().invoke(app, [*words, "--overwrite"]).exit_code == 0 and not (folder / "old").exists()
    private = [str(run), str(run.parent), os.path.expanduser("~")]
    for file in folder.rglob("*"):
        if file.suffix in (".md", ".json", ".jinja"):
            assert not any(path in file.read_text() for path in private), f"{file} names a path of this machine"


@pytest.mark.parametrize(
    ("config", "family", "switch", "parser"),
    [
        ("Qwen3Config", "hybrid", None, " --reasoning-parser qwen3"),
        ("Qwen3Config", "hybrid", False, f"{SWITCH} '{{\"enable_thinking\": false}}'"),
        ("Qwen3_5TextConfig", "hybrid", True, f"{SWITCH} '{{\"enable_thinking\": true}}' --reasoning-parser qwen3"),
        ("LlamaConfig", "thinking", None, " --reasoning-parser deepseek_r1"),
        ("SmolLM3Config", "hybrid", None, "  # --reasoning-parser NAME: see vLLM's list of models"),
        ("LlamaConfig", "instruct", None, ""),
    ],
)
def test_vllm_serves_the_model_as_it_was_trained(config: str, family: str, switch: bool | None, parser: str) -> None:
    """Every model that thinks was served with Qwen3's parser, and hybrids without thinking with it."""
    model = {"name": "my-model", "max_seq_length": 4096, "enable_thinking": switch}
    sections = {"data": {"source": "x.jsonl"}, "rewards": [{"name": "length_reward"}], "rloo": {"max_steps": 1}}
    run = RunConfig.model_validate({"model": model} | sections)
    made = SimpleNamespace(config=getattr(transformers, config)())
    policy = Policy(made, None, "transformers", "a test", ThinkTags(1, 2), family, {})
    assert serve_line(run, policy, "out") == f"vllm serve out --max-model-len 4096{parser}"


def test_the_card_has_the_results_and_the_recipe(make_run: Callable[..., Path]) -> None:
    folder = make_run("card", "rloo.beta=0.01", "data.source=/data/of/mine/rows.jsonl")
    for when, value in (("before", 0.25), ("after", 0.75)):
        shares = [1.0] * int(value * 100) + [0.0] * int(100 - value * 100)
        measures = {"accuracy": around(value, 0.08, shares)}
        found = Evaluation(when, 100, 1, 1.0, 48, measures, prompts_digest="same")
        (folder / f"{when}.json").write_text(json.dumps(found.to_dict()))
    (folder / "versions.json").write_text(json.dumps({"versions": {"torch": "2.13.0", "unsloth": None}}))
    run = find_run(folder)
    loading = {"base_name": "Qwen/Qwen3-4B-Thinking-2507", "included": False, "four_bit": False, "dtype": "bfloat16"}
    text = write_card(run, "adapter", "Qwen/Qwen3-4B-Thinking-2507", ["checked with peft"], loading)
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "Qwen/Qwen3-4B-Thinking-2507" and head["base_model_relation"] == "adapter"
    assert head["library_name"] == "peft" and "rloo" in head["tags"]
    assert "datasets" not in head and "/data/of" not in text and "rows.jsonl" in text
    assert "| accuracy, temperature 1 | 0.250 [0.170, 0.330] | 0.750 [0.670, 0.830] |" in text
    assert "torch 2.13.0" in text and "unsloth" not in text and "- checked with peft" in text
    for name, value in (("baseline", "group_mean"), ("scale_rewards", "group"), ("token_mean", "completion")):
        setattr(run.rloo, name, value)  # it said RLOO of every run
    text = write_card(run, "adapter", "Qwen/Qwen3-4B-Thinking-2507", ["checked with peft"], loading)
    head = yaml.safe_load(text.split("---")[1])
    assert "with GRPO (" in text and "grpo" in head["tags"] and "rloo" not in head["tags"]


def test_missing_data_and_a_full_disk_are_lines(make_run: Callable[..., Path]) -> None:
    """On a full disk there was a traceback; a run whose data file is gone is exported with another source."""
    run = make_run("moved", "data.source=gone.jsonl")
    words = ["export", str(run), "--to", "adapter", "--prompts", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "gone.jsonl" in done.output
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
        done = CliRunner().invoke(app, [*words[:2], "data.source=embedded/addition", *words[2:]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "sampling greedy answers to 2 held-out prompts" in done.output
    assert done.exit_code == 2 and "rloo-kit: the disk is full" in done.output and not list((run / "export").iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"to": "onnx"}, ConfigError, r"--to is 'onnx'; it is one of adapter, merged, gguf, vllm"),
        ({"to": "gguf", "quantization": "q5"}, ConfigError, r"--quantization is 'q5'.*q8_0"),
        ({"to": "merged", "quantization": "q8_0"}, ConfigError, r"--quantization q8_0 is for --to gguf"),
        ({"to": "gguf", "dtype": "float16"}, ConfigError, r"--dtype float16 is for --to merged"),
        ({"to": "merged", "num_prompts": 0}, ConfigError, r"--prompts is 0"),
        # `--output ~ --overwrite` would have put a model in the place of somebody's home
        ({"to": "merged", "output": ".", "overwrite": True}, RunExistsError, r"not an export .*: use --output"),
        ({"to": "merged", "output": "thesis.txt/a/b"}, ConfigError, r"--output is .*/b, and .*txt is not a folder"),
    ],
)
def test_what_is_refused_beforehand(
    embedded_run: Path, tmp_path: Path, arguments: Any, error: type, message: str
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    arguments["output"] = tmp_path / arguments.get("output", "out")
    with pytest.raises(error, match=message):
        kit.export_model(embedded_run, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

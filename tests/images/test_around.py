"""What surrounds a run whose prompts have images: pages, terminals, questions, exports."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import rloo_kit as kit
from rloo_kit.checks.faults import find_faults
from rloo_kit.errors import ConfigError, DataError, ExportError
from rloo_kit.export import export
from rloo_kit.export.parity import check_parity, measure_reference
from rloo_kit.images import tokens
from rloo_kit.results import samples
from rloo_kit.results.verdict import load_evaluation, load_result
from tests.images.models import make, noise
from tests.results.test_report import embedded

RUN = """
run: {{output_dir: {folder}, name: tiny, preflight: false}}
model: {{name: {folder}/base, max_seq_length: 128, backend: transformers, dtype: float32, lora: {{r: 4}}}}
data: {{source: {folder}/rows.jsonl, test_size: 3, max_prompt_length: 64, max_pixels: 2048}}
rewards: [{{name: length_reward}}]
rloo: {{max_steps: 1, per_device_train_batch_size: 8, num_generations: 2, max_completion_length: 8}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a tiny Qwen3-VL, whose adapter is not the identity. One prompt has no image."""
    kit.setup_environment("transformers")
    folder = tmp_path_factory.mktemp("around")
    make("qwen3_vl", folder / "base")
    for number in range(1, 12):
        noise(number, 64, 48).save(folder / f"{number}.png")
    rows = [{"prompt": f"{number}+1=", "image": f"{number}.png" if number else None} for number in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    run = kit.load_config(folder / "run.yaml")
    policy = kit.load_policy(run)
    for name, value in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.2)
    data, rewards = kit.load_data(run, policy.tokenizer), kit.build_rewards(run, policy.tokenizer)
    before = kit.evaluate(run, policy, data.test, reward_funcs=rewards)
    kit.write_report(run, kit.train(run, policy, data, rewards), before, before)
    return run.folder


def test_a_server_is_refused_before_the_model_loads(trained: Path) -> None:
    """Its completions API takes no images; the run ended in its first rollout."""
    words = ["rollout.engine=server", "rollout.server_url=http://127.0.0.1:1"]
    found = find_faults(kit.load_config(trained / "config.yaml", *words))
    assert [one.fix for one in found if "a prompt has an image" in one.found] == ["set rollout.engine=generate or vllm"]


def test_pages_show_pictures_that_the_run_kept(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rloo-kit report` runs where no image was read: prompts were `<|vision_start|><|image:ae0d9f86998aa4|>...`."""
    monkeypatch.setattr(tokens, "LIBRARY", {})
    run = kit.load_config(trained / "config.yaml")
    before = load_evaluation(run, "before")
    page = kit.write_report(run, load_result(run), before, before).read_text()
    data = embedded(page)
    shown = "".join([*(one["prompt"] for one in data["prompts"]), *data["rollouts"]["prompts"]])
    assert set(samples.REFERENCE.findall(shown)) == set(data["images"]) and len(data["images"]) >= 6
    assert all(uri.startswith("data:image/jpeg;base64,") for uri in data["images"].values())
    assert "img-src data:;" in page and "vision_start" not in shown
    for text in map(str, (samples.pick_completions(trained), kit.show_completions(before))):
        assert "[image " in text and "<|image" not in text and "<|vision" not in text


def test_a_page_holds_so_many_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of photographs would make a page of gigabytes; both lists of prompts get their share."""
    digests = [f"{number:014x}" for number in range(300)]
    rows = (json.dumps({"image": digest, "uri": f"data:{digest}"}) for digest in digests)
    (tmp_path / samples.PICTURES).write_text("\n".join(rows))
    prompts = [f"<|image:{digest}|>" for digest in digests]
    assert sorted(samples.read_pictures(tmp_path, prompts[:200], prompts[200:])) == digests[:50] + digests[200:250]
    monkeypatch.setattr(samples, "PICTURE_ROOM", 20)
    assert list(samples.read_pictures(tmp_path, prompts)) == digests[:1]


def test_questions_have_images(trained: Path) -> None:
    """A question about a file; a model without a tower would answer about nothing."""
    run, policy = kit.load_trained(trained)
    files = [trained.parent / f"{number}.png" for number in (1, 2)]
    first, second = (kit.ask(run, policy, "1+1=", images=[file], temperature=0) for file in files)
    assert first.question == "1+1=" and first.thinking != second.thinking
    parts = [{"type": "image", "image": noise(1)}, {"type": "text", "text": "1+1="}]
    assert kit.ask(run, policy, [{"role": "user", "content": parts}]).question.endswith("]1+1=")
    with pytest.raises(DataError, match="nowhere.png"):
        kit.ask(run, policy, "1+1=", images=["nowhere.png"])
    del policy.tokenizer.vision  # as of a model without a tower
    with pytest.raises(ConfigError, match="model.vision=true"):
        kit.ask(run, policy, "1+1=", images=files)


def test_an_export_reads_images_as_the_policy_does(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads it with its own classes and the exported image processor; another processor is found out."""
    for target in ("adapter", "merged"):
        made = kit.export_model(trained, target, num_prompts=3)
        assert made.certificate["checks"][0]["largest"] < 1e-4, target
    assert type(AutoModelForImageTextToText.from_pretrained(made.folder)).__name__ == "Qwen3VLForConditionalGeneration"
    whole, policy = kit.load_trained(made.folder)
    assert not hasattr(policy.model, "peft_config") and whole.data.max_pixels == 2048
    run = kit.load_config(trained / "config.yaml")
    reference = measure_reference(run, policy, list(kit.load_data(run, policy.tokenizer).test["prompt"]))
    file = made.folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.9, 0.1, 0.5]}))
    with pytest.raises(ExportError, match="log-prob"):
        check_parity(reference, "transformers", made.folder, "float32")
    monkeypatch.delattr(export, "load_policy")
    for target in ("gguf", "vllm"):
        with pytest.raises(ExportError, match="--to merged"):
            kit.export_model(trained, target)

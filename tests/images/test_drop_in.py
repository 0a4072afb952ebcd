"""TRL code for vision models with our trainer: what it takes, two steps of each, and what is refused."""

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rloo_kit import RLOOConfig, RLOOTrainer
from rloo_kit.errors import DataError
from tests.images.models import make, make_processor, noise

LORA = LoraConfig(r=2, target_modules=r".*language_model.*(q|v)_proj")
SEEN = [noise(1), noise(2, 24, 56), noise(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def ask(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def column(name):
    """Rows of TRL's convention: a column of images, and conversations, one row without an image."""
    values = [[image] for image in SEEN] + [[]] if name == "images" else [*SEEN, None]
    prompts = [[{"role": "user", "content": "What is it?"}]] * 4
    data = datasets.Dataset.from_dict({"prompt": prompts, "number": list(range(4)), name: values})
    kind = datasets.Image() if name == "image" else datasets.List(datasets.Image())
    return data.cast_column(name, kind)


def parts():
    """Rows whose images are parts of the messages; Arrow gives a text part the key `image`, too."""
    prompts = [ask({"type": "image", "image": image}) for image in SEEN] + [ask()]
    return datasets.Dataset.from_list([{"prompt": prompt, "number": row} for row, prompt in enumerate(prompts)])


CASES = {
    "a name, no processor": (str, None, column("image")),
    "a name, a processor": (str, make_processor, column("images")),
    "a model, a tokenizer": (AutoModelForImageTextToText.from_pretrained, AutoTokenizer.from_pretrained, parts()),
    "a PeftModel, a processor": (
        lambda folder: get_peft_model(AutoModelForImageTextToText.from_pretrained(folder), LORA),
        make_processor,
        column("image"),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lora", [True, False])
def test_trl_code_trains(name, lora, folder, tmp_path, capsys):
    """A processor of TRL's code has no pad token, a reference model of TRL's making read ids of images as tokens, and
    a frozen tower encoded an image in every pass."""
    make_model, make_class, data = CASES[name]
    seen = []

    def reward(prompts, completions, completion_ids, number, **columns):
        seen.extend(zip(prompts, number, completions, columns.get("image", prompts), strict=True))
        return [float(sum(ids) % 7) for ids in completion_ids]

    args = RLOOConfig(
        str(tmp_path), per_device_train_batch_size=16, num_generations=4, max_completion_length=6, max_steps=2,
        learning_rate=1e-2, beta=0.1, report_to="none", log_completions=True, logging_steps=1, eval_strategy="steps",
        eval_steps=2, per_device_eval_batch_size=16,
    )  # fmt: skip
    given = make_class and make_class(folder)
    peft = LORA if lora and "PeftModel" not in name else None
    model = make_model(folder)
    trainer = RLOOTrainer(model, reward, args, data, data, processing_class=given, peft_config=peft)
    before = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    moved = {key for key, value in trainer.model.named_parameters() if not value.equal(before[key])}
    is_adapted = lora or "PeftModel" in name
    assert moved and all("language_model" in key for key in moved) == is_adapted
    assert any("visual" in key for key in moved) != is_adapted  # as TRL trains a bare model
    reader = (trainer.model.get_base_model() if is_adapted else trainer.model).base_model.forward.__self__
    assert not is_adapted or reader.encoded == len(SEEN) + 1  # and the image of the scorer's check
    texts = {number: prompt[0]["content"] for prompt, number, *_ in seen}
    assert [str(texts[number]).count("<|image:") for number in range(4)] == [1, 1, 1, 0]
    assert all(completion[0]["role"] == "assistant" for _, _, completion, _ in seen)
    (folder_of_checkpoint,) = tmp_path.glob("checkpoint-*")
    assert {"preprocessor_config.json", "tokenizer.json"} <= {file.name for file in folder_of_checkpoint.iterdir()}


def test_what_is_refused(folder, tiny_folder, tmp_path):
    """A text model was trained on prompts from which the template had dropped the images."""
    args = RLOOConfig(str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_steps=1, report_to="none")
    data = column("image")
    with pytest.raises(DataError, match="images in column image.*drop the column.*qwen3_vl"):
        RLOOTrainer(str(tiny_folder), lambda prompts, **_: [0.0] * len(prompts), args, data).train()
    data = datasets.Dataset.from_dict({"prompt": ["What?"] * 4, "image": [SEEN[0]] * 4})
    with pytest.raises(DataError, match="its prompt is a text.*Give messages"):
        RLOOTrainer(str(folder), lambda prompts, **_: [0.0] * len(prompts), args, data).train()

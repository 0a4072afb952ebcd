"""TRL code for vision models with our trainer: its step is TRL's, what it takes, and what is refused."""

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rloo_kit import RLOOConfig, RLOOTrainer
from rloo_kit.errors import ConfigError, DataError
from tests.images.models import make, make_processor, noise
from tests.loop.conftest import by_length
from tests.loop.test_equality_with_stock import _batch_loss_gradients, _make, _relative, _sides
from tests.loop.test_equality_with_stock import stock_head as stock_head
from tests.rollout.models import adapted

IMAGES = [[noise(1, 40, 24), noise(2)], [], [noise(3, 24, 56)]]
TEXT = r".*language_model.*(q|v|down)_proj"
TARGETS = {"adapter": TEXT, "adapter of the tower too": r".*(q_proj|v_proj|qkv|linear_fc\d)", "all weights": None}
CALLS = {"name": (None, "image"), "bare": (make_processor, "images"), "lora": (None, "images")}
CALLS |= {"peft": (AutoTokenizer.from_pretrained, "parts")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def rows(column):
    """Conversations with their images in a column of TRL's, or as parts of the messages."""
    table = []
    for number, images in enumerate(IMAGES):
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "What?"}]
        row = {"prompt": [{"role": "user", "content": parts if column == "parts" else "What?"}], "number": number}
        own = {"images": images, "image": images[-1] if images else None}
        table.append(row | ({column: own[column]} if column in own else {}))
    return datasets.Dataset.from_list(table)


@pytest.mark.parametrize("name", TARGETS)
def test_a_step_with_images_is_trls(name, folder, tmp_path):
    """Positions of images that are off by a few change every gradient by a little, and no loss shows it."""
    targets, results = TARGETS[name], []
    for sides in _sides():
        model = AutoModelForImageTextToText.from_pretrained(folder)
        model = adapted(model, target_modules=targets) if targets else model
        trainer = _make(sides, model, make_processor(folder), tmp_path, [by_length], data=rows("images"), beta=0.1)
        with torch.no_grad():  # away from the reference, which is the adapter's start, or the checkpoint
            for key, value in trainer.model.named_parameters():
                if ("lora_A.default" in key) if targets else ("layers" in key and value.dim() > 1):
                    value.mul_(1.5)
        results.append(_batch_loss_gradients(trainer))
    (their_advantages, their_loss, theirs), (advantages, loss, ours) = results
    assert their_advantages.abs().max() > 0.05 and _relative(advantages, their_advantages) < 1e-5
    assert abs(loss - their_loss) <= 1e-5 * max(1.0, abs(their_loss))
    assert ours.keys() == theirs.keys() and any("visual" in key for key in ours) == (name != "adapter")
    together = [torch.cat([found[key].flatten() for key in sorted(found)]) for found in (ours, theirs)]
    assert together[1].norm() > 1e-3 and _relative(*together) < 1e-5


@pytest.mark.parametrize("kind", CALLS)
def test_trl_code_trains(kind, folder, tmp_path):
    """A processor was taken for the tokenizer, the reference model of TRL's making read ids of images as tokens, and a
    frozen tower encoded an image in every pass."""
    (make_class, column), seen = CALLS[kind], {}

    def reward(prompts, completions, completion_ids, number, **_):
        assert all(completion[0]["role"] == "assistant" for completion in completions)
        seen.update({one: str(prompt).count("<|image:") for one, prompt in zip(number, prompts, strict=True)})
        return [float(sum(ids) % 7) for ids in completion_ids]

    args = RLOOConfig(
        str(tmp_path), per_device_train_batch_size=12, num_generations=4, max_completion_length=6, max_steps=2,
        beta=0.1, learning_rate=1e-2, report_to="none", log_completions=True, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    model = str(folder) if kind == "name" else AutoModelForImageTextToText.from_pretrained(folder)
    model = adapted(model, target_modules=TEXT) if kind == "peft" else model
    given, peft = make_class and make_class(folder), LoraConfig(target_modules=TEXT) if kind == "lora" else None
    trainer = RLOOTrainer(model, reward, args, rows(column), rows(column).select([0, 2]), given, peft_config=peft)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, value in trainer.model.named_parameters() if not value.equal(before[name])]
    assert moved and any("visual" in name for name in moved) == (kind in ("name", "bare"))  # as with TRL
    if kind in ("lora", "peft"):  # three images, and that of the scorer's check
        assert trainer.model.get_base_model().base_model.forward.__self__.encoded == 4
    assert seen == {0: 1 if column == "image" else 2, 1: 0, 2: 1}
    assert (tmp_path / "checkpoint-2" / "preprocessor_config.json").is_file()


def test_what_is_refused(folder, tiny_folder, tmp_path):
    """A text model was trained on prompts from which its template had dropped the images."""
    args = RLOOConfig(str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_steps=1, report_to="none")
    data = rows("images").select([0])
    with pytest.raises(DataError, match="images in column images: drop the column, or .*qwen3_vl"):
        RLOOTrainer(str(tiny_folder), by_length, args, data).train()
    drawing = RLOOConfig(str(tmp_path), resample_rounds=1, num_generations=2, max_steps=1, report_to="none")
    with pytest.raises(ConfigError, match="resample_rounds does not work with columns of images"):
        RLOOTrainer(str(folder), by_length, drawing, data)
    data = data.remove_columns("prompt").add_column("prompt", ["a text"])
    with pytest.raises(DataError, match="2 images and its prompt is a text.*Give messages"):
        RLOOTrainer(str(folder), by_length, args, data).train()

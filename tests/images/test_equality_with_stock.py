"""A step on prompts with images against TRL's own: its trainer, with transformers' processor of Qwen3-VL."""

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from tests.images.models import make, make_processor, noise
from tests.loop.conftest import by_length
from tests.loop.test_equality_with_stock import _batch_loss_gradients, _make, _relative, _sides
from tests.loop.test_equality_with_stock import stock_head as stock_head

IMAGES = [[noise(1, 40, 24), noise(2)], [], [noise(3, 24, 56)], []]
QUESTION = [{"role": "user", "content": "What is it?"}]
CASES = {
    "adapter": (r".*language_model.*(q|v|down)_proj", IMAGES),
    "adapter, a row without": (r".*language_model.*(q|v|down)_proj", [IMAGES[0], [], []]),
    "adapter of the tower too": (r".*(q_proj|v_proj|qkv|linear_fc\d)", IMAGES),
    "all weights": (None, IMAGES),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_images_is_trls(name, folder, tmp_path):
    """Positions of images that are off by a few change every gradient by a little, and no loss shows it."""
    (targets, images), results = CASES[name], []
    data = datasets.Dataset.from_dict({"prompt": [QUESTION] * len(images), "images": images})
    data = data.cast_column("images", datasets.List(datasets.Image()))
    for sides in _sides():
        model = AutoModelForImageTextToText.from_pretrained(folder)
        if targets:
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
            for key, value in model.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(value, std=0.3)
        trainer = _make(sides, model, make_processor(folder), tmp_path, [by_length], data=data, beta=0.1)
        with torch.no_grad():  # away from the reference, which is the adapter's start, or the checkpoint
            for key, value in trainer.model.named_parameters():
                if ("lora_A.default" in key) if targets else ("layers" in key and value.dim() > 1):
                    value.mul_(1.5)
        results.append(_batch_loss_gradients(trainer))
    (their_advantages, their_loss, theirs), (advantages, loss, ours) = results
    assert their_advantages.abs().max() > 0.05 and _relative(advantages, their_advantages) < 1e-5
    assert abs(loss - their_loss) <= 1e-5 * max(1.0, abs(their_loss))
    assert ours and ours.keys() == theirs.keys()
    assert any("visual" in key for key in ours) == ("adapter" not in name or "tower" in name)
    together = [torch.cat([found[key].flatten() for key in sorted(found)]) for found in (ours, theirs)]
    print("relative", _relative(*together))
    assert together[1].norm() > 1e-3 and _relative(*together) < 1e-5

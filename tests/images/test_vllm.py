"""What vLLM gets of a prompt with images, and what is refused before it starts; real vLLM is in tests/with_vllm."""

from types import SimpleNamespace

import pytest

from rloo_kit.errors import BackendError
from rloo_kit.images.files import read_picture
from rloo_kit.images.tokens import FIRST_ID
from rloo_kit.vllm.engines import ServerEngine
from rloo_kit.vllm.images import image_arguments, make_prompt
from tests.images.models import make, noise
from tests.images.test_exactness import Pair

LARGE = noise(7, 150, 100)


def test_an_image_is_one_placeholder_and_a_picture_in_its_final_size(tmp_path):
    """vLLM expands the ids of an image once more, and its own resize is 4e-3 nats off."""
    pair = Pair(make("qwen3_vl", tmp_path))
    picture, pad = read_picture(LARGE, None), pair.vision.config.image_token_id
    ids, scaled = pair.read("1", LARGE, LARGE, noise(8), "2+3="), {}
    found = make_prompt([*ids, pad], pair.vision, scaled)
    assert found["prompt_token_ids"].count(pad) == 4, "three images, and one that was sampled as text"
    assert found["multi_modal_uuids"]["image"][:2] == [picture.digest] * 2 and len(scaled) == 2
    image = found["multi_modal_data"]["image"][0]
    assert image.size == pair.vision.target(picture) < LARGE.size
    pixels, again = pair.vision.pixels(picture), pair.vision.processor(images=[image], return_tensors="pt")
    assert pixels["pixel_values"].equal(again["pixel_values"])
    assert make_prompt([1, pad], pair.vision, {}) == {"prompt_token_ids": [1, pad]}
    with pytest.raises(BackendError, match="9 images.*rollout.engine=generate"):
        make_prompt([one for one in ids if one >= FIRST_ID] * 3, pair.vision, {})
    with pytest.raises(BackendError, match="no images: set rollout.engine=generate"):
        ServerEngine._finish(SimpleNamespace(), SimpleNamespace(states=[SimpleNamespace(prompt=ids)]))


@pytest.mark.parametrize(("kind", "tower", "text"), [("gemma3", False, "only"), ("qwen3_vl", True, "lora.vision")])
def test_what_vllm_cannot_sample_is_refused(kind, tower, text, tmp_path):
    """It ignores the tower's adapter without a word."""
    pair = Pair(make(kind, tmp_path), tower)
    with pytest.raises(BackendError, match=f"{text}.*rollout.engine=generate"):
        image_arguments(pair.model, pair.vision, False)

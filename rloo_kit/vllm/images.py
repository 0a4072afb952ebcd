"""Images in the prompts of this process's vLLM: placeholders, which it expands, and pictures in their final size, since
its own resize rounds differently (4e-3 nats)."""

from itertools import groupby
from typing import Any

from rloo_kit.errors import BackendError
from rloo_kit.images.tokens import FIRST_ID, Vision, digest_of, find_picture
from rloo_kit.models.backends import base_of

MOST_IMAGES = 8  # in a prompt
CLASSES = ("qwen3_vl", "qwen2_5_vl")  # that were tried


def find_vision(model: Any) -> Vision | None:
    """What a model does with images; None if it reads none."""
    check = getattr(base_of(model).base_model, "check_prompt", None)
    return None if check is None else check.__self__.vision


def image_arguments(model: Any, vision: Vision | None, four_bit: bool) -> dict[str, Any]:
    """Keywords of `vllm.LLM` for a PeftModel; BackendError if it reads images in a way that was not tried."""
    if vision is None:
        return {}
    found = f"images were tried with {' and '.join(CLASSES)} only" if vision.config.model_type not in CLASSES else ""
    if any(".visual." in name and "lora_" in name for name, _ in model.named_parameters()):
        found = "vLLM would ignore the adapter of the vision tower (model.lora.vision)"
    if found or four_bit:
        found = found or "vLLM would load the vision tower in 4 bits too (model.load_in_4bit)"
        raise BackendError(f"rollout.engine is vllm, but {found}: set rollout.engine=generate")
    limits, sizes = {"image": MOST_IMAGES, "video": 0}, {"size": dict(vision.processor.size)}
    return {"skip_tokenizer_init": False, "limit_mm_per_prompt": limits, "mm_processor_kwargs": sizes}


def make_prompt(ids: list[int], vision: Vision | None, scaled: dict[str, Any]) -> dict[str, Any]:
    """vLLM's prompt for token ids. `scaled`: pictures by digest, for the next prompt."""
    short, digests = list[int](), list[str]()
    for token, run in groupby(ids):
        if vision is None or token < FIRST_ID:
            short += run
            continue
        picture = find_picture(digest := digest_of(token))
        count = len(list(run)) // vision.count(picture)
        short, digests = short + [vision.config.image_token_id] * count, digests + [digest] * count
        scaled[digest] = scaled.get(digest) or vision.scaled(picture)
    if len(digests) > MOST_IMAGES:
        most = f"vLLM was started for {MOST_IMAGES}: set rollout.engine=generate, or leave out such prompts"
        raise BackendError(f"a prompt has {len(digests)} images, and {most}")
    data, names = {"image": [scaled[digest] for digest in digests]}, {"image": digests}
    return {"prompt_token_ids": short} | ({"multi_modal_data": data, "multi_modal_uuids": names} if digests else {})

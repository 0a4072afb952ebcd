"""Prompts with images against transformers alone, one sequence at a time: scores, gradients, samples, budgets."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rloo_kit.errors import BackendError
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scorer
from rloo_kit.images.files import read_picture
from rloo_kit.images.model import ImageReader, attach
from rloo_kit.images.tokens import FIRST_ID, Vision, digest_of, find_picture, refer
from rloo_kit.models.adapters import choose_targets, find_outside
from rloo_kit.rollout.choice import build_engine
from rloo_kit.rollout.types import Limits
from tests.images.models import KINDS, make, noise
from tests.rollout.models import BUDGET, budget_kinds, shake

VOCABULARY, NEVER, TOLERANCE = 272, 10_000, 1e-5  # an id that no model draws, so that no completion ends early
A, B, C = noise(1), noise(2, 64, 24), noise(3, 16, 48)
PROMPTS = [[A, "12+3="], ["1", B, "2", C, "3+4="], ["a longer question without an image: 7+8="], [A, A, "9"]]


@dataclass
class Pair:
    """A model that reads images, and the same weights in transformers' own class."""

    model: Any
    plain: Any
    tokenizer: Any
    vision: Vision
    reader: ImageReader

    def read(self, *parts: Any) -> list[int]:
        """The ids of a prompt."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str)
            else {"type": "image", "image": refer(read_picture(part, None))}
            for part in parts
        ]  # fmt: skip
        talk = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text)["input_ids"]

    def scorer(self) -> Scorer:
        return Scorer(self.model, 1.0, self.tokenizer.pad_token_id)

    def alone(self, ids: list[int], completion: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (C, V) after a prompt from pixels, by the class that knows nothing of ids of images."""
        row = torch.tensor(ids)
        is_image, present = row >= FIRST_ID, {*ids, *completion.tolist()}
        place = self.vision.config.image_token_id
        if place in present:  # drawn as text, which transformers' own input cannot express
            place = max({*range(VOCABULARY)} - present)
        self.plain.config.image_token_id = place
        inputs: dict[str, Any] = {"input_ids": torch.cat([row.masked_fill(is_image, place), completion])[None]}
        digests = [digest_of(token) for token, _ in groupby(ids) if token >= FIRST_ID]
        if digests:
            pixels = [self.vision.pixels(find_picture(digest)) for digest in digests]
            inputs |= {name: torch.cat([one[name] for one in pixels]) for name in pixels[0]}
            kinds = torch.cat([is_image.long(), torch.zeros_like(completion)])[None]
            inputs["mm_token_type_ids" if "image_grid_thw" in inputs else "token_type_ids"] = kinds
        return self.plain(**inputs).logits[0, len(row) - 1 : -1].float().log_softmax(-1)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param))


def load(folder, tower=False):
    """A pair with adapters on the language layers, or with `tower` on those of the vision tower too."""
    vision, models = Vision(str(folder), AutoConfig.from_pretrained(folder), 4096), []
    for _ in range(2):
        model = AutoModelForImageTextToText.from_pretrained(folder)
        outside = None if tower else find_outside(model)
        models.append((model, LoraConfig(target_modules=choose_targets(model, None, tower), exclude_modules=outside)))
    tokenizer = attach(models[0][0], AutoTokenizer.from_pretrained(folder), vision)
    model, plain = (get_peft_model(*one).eval() for one in models)
    shake(model)
    shake(plain)
    return Pair(model, plain, tokenizer, vision, model.get_base_model().base_model.forward.__self__)


def make_groups(pair, prompts):
    """Two completions of each prompt; of the first and the third, one has the model's own image token."""
    generator = torch.Generator().manual_seed(1)
    drawn = [[torch.randint(256, (size,), generator=generator) for size in (5, 9)] for _ in prompts]
    drawn[0][1][3] = drawn[2][0][2] = pair.vision.config.image_token_id
    return [Group(torch.tensor(ids), one) for ids, one in zip(prompts, drawn, strict=True)]


def gradients(model, logps, factors):
    """Of a weighted sum, by name."""
    model.zero_grad()
    (logps * factors).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}


def flat(found):
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.mark.parametrize("tower", [False, True], ids=["frozen tower", "tower with an adapter"])
def test_scores_and_gradients_are_those_of_single_sequences(folder, tower):
    """Of a batch with images of several sizes, one twice, and none; a completion may have the image token as text,
    which transformers takes for another image. A frozen tower encoded an image once for each layout."""
    pair = load(folder, tower)
    groups = make_groups(pair, [pair.read(*parts) for parts in PROMPTS])
    pairs = [(one.prompt.tolist(), ids) for one in groups for ids in one.completions]
    expected = torch.cat([pair.alone(prompt, ids).gather(1, ids[:, None])[:, 0] for prompt, ids in pairs])
    factors = torch.linspace(-1.0, 2.0, len(expected))
    wanted = gradients(pair.plain, expected, factors)
    assert any("visual" in name or "vision_tower" in name for name in wanted) == tower
    scorer = pair.scorer()
    pair.reader.encoded = 0
    assert set(scorer.layouts) <= {"shared", "padded"}
    for layout in ("padded", "shared", "repeated") if "shared" in scorer.layouts else ("padded",):
        logps = scorer.score(pair.model, groups, layout=layout).logps
        assert (logps - expected).abs().max() < TOLERANCE, layout
        found = gradients(pair.model, logps, factors)
        assert found.keys() == wanted.keys()
        assert (flat(found) - flat(wanted)).norm() < TOLERANCE * flat(wanted).norm(), layout
        print(layout, (logps - expected).abs().max().item(), ((flat(found) - flat(wanted)).norm() / flat(wanted).norm()).item())
    assert tower or pair.reader.encoded == 3


def test_an_image_moves_its_own_row_only(folder):
    """The states of a batch's images stand end to end: one that is counted wrongly shifts those of all later rows."""
    pair, others, found = load(folder), slice(14, None), []
    for image in (B, noise(9, 64, 24), noise(8, 40, 40)):  # another, and one of another size
        prompts = [pair.read("1", image, "2")] + [pair.read(*parts) for parts in PROMPTS[1:]]
        logps = pair.scorer().score(pair.model, make_groups(pair, prompts), layout="padded").logps
        own = gradients(pair.model, logps[others], torch.linspace(-1.0, 2.0, len(logps) - 14))
        engine = build_engine(pair.model, temperature=1.0, end_ids=[NEVER], pad_id=256)
        torch.manual_seed(0)
        found.append((logps.detach(), flat(own), engine.sample(prompts, Limits(8)).completion_ids))
    first = found[0]
    for changed, tolerance in ((found[1], 0.0), (found[2], 1e-6)):
        assert (changed[0][others] - first[0][others]).abs().max() <= tolerance
        assert (changed[1] - first[1]).norm() <= tolerance * first[1].norm()
        assert changed[2][1:] == first[2][1:] and (changed[0][:14] - first[0][:14]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["native", "generate"])
def test_engines_sample_what_is_scored(folder, name):
    """A step that continues without the offset of its row's images draws from another distribution; so do rows that
    took a place in the cache from others. A budget closes thinking as without images."""
    pair = load(folder)
    kind = pair.model.config.model_type
    tolerance = 1e-4 if kind == "qwen3_5" else TOLERANCE  # its recurrence, token by token; texts differ as much
    options = {"temperature": 1.0, "end_ids": list(range(10, VOCABULARY, 12)), "pad_id": 256, "rows": 5}
    if name == "native" and kind in ("qwen3_5", "gemma3"):
        with pytest.raises(BackendError, match="set rollout.engine=generate"):
            build_engine(pair.model, name, **options)
        return
    scorer, prompts = pair.scorer(), [pair.read(*parts) for parts in PROMPTS for _ in range(3)]
    pair.reader.encoded = 0
    for limits in (Limits(30), BUDGET):
        torch.manual_seed(0)
        found = build_engine(pair.model, name, **options).sample(prompts, limits)
        assert len({len(ids) for ids in found.completion_ids}) > 2, "no row took another's place"
        groups = [Group(torch.tensor(prompts[3 * row]), list(map(torch.tensor, found.completion_ids[3 * row :][:3])))
                  for row in range(4)]  # fmt: skip
        with torch.no_grad():
            scored = scorer.score(pair.model, groups, need_entropy=False).logps
        sampled = torch.tensor([logp for row in found.sampler_logps for logp in row])
        forced = torch.tensor([any(start <= place < end for start, end in spans) for spans, ids in
                               zip(found.forced, found.completion_ids, strict=True) for place in range(len(ids))])
        assert forced.equal(sampled.isnan()) and (sampled - scored)[~forced].abs().max() < tolerance
        print(name, kind, (sampled - scored)[~forced].abs().max().item())
    assert {"forced", "ended"} <= budget_kinds(found, BUDGET)
    greedy = build_engine(pair.model, name, **options | {"temperature": 0.0}).sample(prompts[::3], Limits(12))
    for ids, drawn in zip(prompts[::3], greedy.completion_ids, strict=True):
        assert pair.alone(ids, torch.tensor(drawn)).argmax(-1).tolist() == drawn
    assert pair.reader.encoded == 3

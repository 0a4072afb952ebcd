"""Prompts with images against transformers alone, one sequence at a time: scores, gradients, samples, budgets."""

from itertools import groupby

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rloo_kit.errors import BackendError
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.scorer import Scorer
from rloo_kit.images.files import read_picture
from rloo_kit.images.model import attach
from rloo_kit.images.tokens import FIRST_ID, Vision, digest_of, find_picture, refer
from rloo_kit.models.adapters import choose_targets, find_outside
from rloo_kit.rollout.choice import build_engine
from rloo_kit.rollout.types import Limits
from tests.images.models import KINDS, make, noise
from tests.rollout.models import BUDGET, adapted, budget_kinds

TOLERANCE, NEVER = 1e-5, 10_000  # an id that no model draws, so that no completion ends early
A, B, C = noise(1), noise(2, 64, 24), noise(3, 16, 48)
PROMPTS = [[A, "12+3="], ["1", B, "2", C, "3+4="], ["a longer question without an image: 7+8="], [A, A, "9"]]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param))


class Pair:
    """A model that reads images, and `plain`, the same weights in transformers' own class, both with an adapter: of the
    language layers, or with `tower` of all."""

    def __init__(self, folder, tower=False):
        self.vision = Vision(str(folder), AutoConfig.from_pretrained(folder), 4096)
        models = [AutoModelForImageTextToText.from_pretrained(folder) for _ in range(2)]
        names, outside = choose_targets(models[0], None, tower), None if tower else find_outside(models[0])
        self.tokenizer = attach(models[0], AutoTokenizer.from_pretrained(folder), self.vision)
        self.reader = models[0].base_model.forward.__self__
        options = {"target_modules": names, "exclude_modules": outside}
        self.model, self.plain = (adapted(model, 0.1, **options).eval() for model in models)
        self.scorer = Scorer(self.model, 1.0, 256)
        self.reader.encoded = 0

    def read(self, *parts):
        """The ids of a prompt."""
        written = [
            ("text", part) if isinstance(part, str) else ("image", refer(read_picture(part, None))) for part in parts
        ]
        talk = [{"role": "user", "content": [{"type": kind, kind: value} for kind, value in written]}]
        return self.tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]

    def alone(self, ids, completion):
        """Log-probabilities (C, V) after a prompt from pixels, by the class that knows nothing of ids of images."""
        row, present = torch.tensor(ids), {*ids, *completion.tolist()}
        place = self.vision.config.image_token_id
        if place in present:  # drawn as text, which transformers' own input cannot express
            place = max({*range(272)} - present)
        self.plain.config.image_token_id = place
        inputs = {"input_ids": torch.cat([row.masked_fill(row >= FIRST_ID, place), completion])[None]}
        digests = [digest_of(token) for token, _ in groupby(ids) if token >= FIRST_ID]
        pixels = [self.vision.pixels(find_picture(digest)) for digest in digests]
        if pixels:
            inputs |= {name: torch.cat([one[name] for one in pixels]) for name in pixels[0]}
            kinds = torch.cat([(row >= FIRST_ID).long(), torch.zeros_like(completion)])[None]
            inputs["mm_token_type_ids" if "image_grid_thw" in inputs else "token_type_ids"] = kinds
        return self.plain(**inputs).logits[0, len(row) - 1 : -1].log_softmax(-1)

    def groups(self, prompts):
        """Two completions of each prompt; of the first and the third, one has the model's own image token."""
        generator = torch.Generator().manual_seed(1)
        drawn = [[torch.randint(256, (size,), generator=generator) for size in (5, 9)] for _ in prompts]
        drawn[0][1][3] = drawn[2][0][2] = self.vision.config.image_token_id
        return [Group(torch.tensor(ids), one) for ids, one in zip(prompts, drawn, strict=True)]


def gradient(model, logps):
    """Of a weighted sum, end to end."""
    model.zero_grad()
    (logps * torch.linspace(-1.0, 2.0, len(logps))).sum().backward()
    return torch.cat([value.grad.flatten() for value in model.parameters() if value.requires_grad])


@pytest.mark.parametrize("tower", [False, True], ids=["frozen tower", "tower with an adapter"])
def test_scores_and_gradients_are_those_of_single_sequences(folder, tower):
    """Of a batch with images of several sizes, one twice, and none; a completion may have the image token as text,
    which transformers takes for another image. A frozen tower encoded an image once for each layout."""
    pair = Pair(folder, tower)
    assert any("lora" in name for name, _ in pair.reader.model.named_parameters() if "vis" in name) == tower
    groups = pair.groups([pair.read(*parts) for parts in PROMPTS])
    rows = [(one.prompt.tolist(), ids) for one in groups for ids in one.completions]
    expected = torch.cat([pair.alone(prompt, ids).gather(1, ids[:, None])[:, 0] for prompt, ids in rows])
    wanted = gradient(pair.plain, expected)
    for layout in ("padded", "shared", "repeated") if "shared" in pair.scorer.layouts else ("padded",):
        logps = pair.scorer.score(pair.model, groups, layout=layout).logps
        assert (logps - expected).abs().max() < TOLERANCE, layout
        assert (gradient(pair.model, logps) - wanted).norm() < TOLERANCE * wanted.norm(), layout
    assert tower or pair.reader.encoded == 3


def test_an_image_moves_its_own_row_only(folder):
    """The states of a batch's images stand end to end: one that is counted wrongly shifts those of all later rows."""
    pair, found = Pair(folder), []
    for image in (B, noise(9, 64, 24), noise(8, 40, 40)):  # another, and one of another size
        prompts = [pair.read("1", image, "2")] + [pair.read(*parts) for parts in PROMPTS[1:]]
        own, others = pair.scorer.score(pair.model, pair.groups(prompts), layout="padded").logps.tensor_split([14])
        engine = build_engine(pair.model, temperature=1.0, end_ids=[NEVER], pad_id=256)
        torch.manual_seed(0)
        samples = engine.sample(prompts, Limits(8)).completion_ids[1:]
        found.append((own.detach(), others.detach(), gradient(pair.model, others), samples))
    first, *changed = found
    for (own, others, moved, samples), tolerance in zip(changed, (0.0, 1e-6), strict=True):
        assert (own - first[0]).abs().max() > 1e-3 and (others - first[1]).abs().max() <= tolerance
        assert (moved - first[2]).norm() <= tolerance * moved.norm() and samples == first[3]


@pytest.mark.parametrize("name", ["native", "generate"])
def test_engines_sample_what_is_scored(folder, name):
    """A step that continues without the offset of its row's images draws from another distribution; so do rows that
    took a place in the cache from others. A budget closes thinking as without images."""
    pair = Pair(folder)
    kind = pair.model.config.model_type
    tolerance = 1e-4 if kind == "qwen3_5" else TOLERANCE  # its recurrence, token by token; texts differ as much
    options = {"temperature": 1.0, "end_ids": list(range(10, 272, 12)), "pad_id": 256, "rows": 5}
    if name == "native" and kind in ("qwen3_5", "gemma3"):
        with pytest.raises(BackendError, match="set rollout.engine=generate"):
            build_engine(pair.model, name, **options)
        return
    prompts = [pair.read(*parts) for parts in PROMPTS for _ in range(3)]
    for limits in (Limits(30), BUDGET):
        torch.manual_seed(0)
        found = build_engine(pair.model, name, **options).sample(prompts, limits)
        assert len({len(ids) for ids in found.completion_ids}) > 2, "no row took another's place"
        rows = [torch.tensor(row) for row in found.completion_ids]
        groups = [Group(torch.tensor(prompts[first]), rows[first : first + 3]) for first in range(0, len(rows), 3)]
        scored = pair.scorer.score(pair.model, groups).logps.detach()
        sampled = torch.tensor([logp for logps in found.sampler_logps for logp in logps])
        assert sampled.isnan().sum() == sum(end - start for spans in found.forced for start, end in spans)
        assert (sampled - scored).nan_to_num().abs().max() < tolerance
    assert {"forced", "ended"} <= budget_kinds(found, BUDGET)
    greedy = build_engine(pair.model, name, **options | {"temperature": 0.0}).sample(prompts[::3], Limits(12))
    for ids, drawn in zip(prompts[::3], greedy.completion_ids, strict=True):
        assert pair.alone(ids, torch.tensor(drawn)).argmax(-1).tolist() == drawn
    assert pair.reader.encoded == 3

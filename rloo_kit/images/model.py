"""A model that reads ids of images: its forward turns them into the states of its vision tower and into positions.

The forward of the base model is wrapped, so that generation, scoring and training see the same. An image is encoded
alone, so its states do not depend on its neighbours; with a frozen tower they are kept for the next pass.

Shapes: B rows, L tokens, T of a packed row, n states of an image, H hidden size.
"""

import types
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from rloo_kit.config.run import RunConfig
from rloo_kit.errors import BackendError, DataError
from rloo_kit.images.files import read_picture
from rloo_kit.images.tokens import FIRST_ID, WRITINGS, Vision, digest_of, find_picture, image_id, refer, see
from rloo_kit.models.backends import base_of
from rloo_kit.sizes import FEATURE_CACHE_BYTES

TEXT = "language_model."  # of the parameters of a base model that are not the tower's
CHECK_SIDE = 2  # side of the image in the scorer's check, in tokens

States = tuple[torch.Tensor, ...]  # (n, H) each: what replaces the embeddings, and what later layers add


class ImageReader:
    """The wrapped forward of a base model.

    Attributes:
        model: the base model of a conditional-generation class. vision: what its checkpoint does with images.
        encoded: how many images the tower has encoded. kept: their states by digest and precision, with a frozen tower.
    """

    def __init__(self, model: Any, vision: Vision) -> None:
        self.model, self.vision = model, vision
        self.encoded = 0
        self._forward, self._encode = model.forward, model.get_image_features
        self.kept: OrderedDict[tuple[str, Any], States] = OrderedDict()
        self._wanted: list[str] = []  # digests of the images of the running call, in order
        self._has_grid = hasattr(model, "get_rope_index")

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """The model's, for ids (B, L) that may contain images."""
        known = {"attention_mask": attention_mask, "past_key_values": past_key_values} | options
        offsets = getattr(past_key_values, "position_offsets", None)
        if input_ids is None or input_ids.size(1) == 1 or not bool((is_image := input_ids >= FIRST_ID).any()):
            if offsets is not None and position_ids is not None:
                position_ids = _add(position_ids, offsets)
            return self._forward(input_ids=input_ids, position_ids=position_ids, **known)
        rows = input_ids.tolist()
        self._wanted = [digest for row in rows for digest in self._images_of(row)]
        given: dict[str, Any] = {"pixel_values": torch.empty(0, device=input_ids.device)}
        offsets = None
        if self._has_grid:
            given["image_grid_thw"] = self._grids(self._wanted).to(input_ids.device)
            position_ids, offsets = self._place(input_ids, is_image, attention_mask, position_ids)
        else:
            given["token_type_ids"] = is_image.long()
        config, present = self.model.config, {token for row in rows for token in row}
        before = config.image_token_id
        # an id that no text of the call has: one that the model drew for an image token is text
        config.image_token_id = next(token for token in range(len(present) + 1) if token not in present)
        try:
            ids = input_ids.masked_fill(is_image, config.image_token_id)
            output = self._forward(input_ids=ids, position_ids=position_ids, **(known | given))
        finally:
            config.image_token_id = before
        if offsets is not None and getattr(output, "past_key_values", None) is not None:
            output.past_key_values.position_offsets = offsets
        return output

    def features(self, *_more: Any, **_named: Any) -> Any:
        """In place of the model's `get_image_features`: those of the running call's images."""
        named = self.model.named_parameters()
        trains = any(value.requires_grad or "lora_" in name for name, value in named if not name.startswith(TEXT))
        made = {digest: self._states(digest, trains) for digest in dict.fromkeys(self._wanted)}
        states = [made[digest] for digest in self._wanted]
        first, *later = (list(parts) for parts in zip(*states, strict=True))
        deepstack = [torch.cat(parts) for parts in later]
        return types.SimpleNamespace(
            pooler_output=tuple(first) if self._has_grid else torch.stack(first), deepstack_features=deepstack
        )

    def check_prompt(self) -> list[int]:
        """The ids of a small image, for the check of the scorer's layouts; none without an image processor."""
        try:
            side = self.vision.processor.patch_size * CHECK_SIDE * self.vision.processor.merge_size
        except (AttributeError, DataError):
            return []
        picture = read_picture(Image.linear_gradient("L").resize((side, side)), None)
        refer(picture)
        return [image_id(picture.digest)] * self.vision.count(picture)

    def _images_of(self, row: list[int]) -> Iterator[str]:
        """The digests of the images of a row, in order."""
        for token, run in groupby(row):
            if token >= FIRST_ID:
                digest, states = digest_of(token), len(list(run))
                yield from [digest] * (states // self.vision.count(find_picture(digest)))

    def _grids(self, digests: list[str]) -> torch.Tensor:
        """(images, 3): frames, height and width in patches."""
        patch, sizes = (
            self.vision.processor.patch_size,
            [self.vision.target(find_picture(digest)) for digest in digests],
        )
        return torch.tensor([[1, height // patch, width // patch] for width, height in sizes])

    def _states(self, digest: str, trains: bool) -> States:
        """The states of an image; kept for the next call if the tower is frozen rather than trained."""
        device = self.model.get_input_embeddings().weight.device
        key = digest, torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        if not trains and key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        inputs = {name: value.to(device) for name, value in self.vision.pixels(find_picture(digest)).items()}
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            output = self._encode(**inputs, return_dict=True)
        self.encoded += 1
        states = output.pooler_output[0], *(getattr(output, "deepstack_features", None) or ())
        if not trains:
            self.kept[key] = states
            while len(self.kept) > 1 and sum(map(_bytes, self.kept.values())) > FEATURE_CACHE_BYTES:
                self.kept.popitem(last=False)
        return states

    def _place(
        self, ids: torch.Tensor, is_image: torch.Tensor, mask: Any, plain: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions (4, B, L), of the text and of the model's three axes, and what later tokens of each row add to
        theirs (B, 1), because an image takes fewer positions than tokens. `plain`: (1, T) positions of a packed row,
        in which a sequence begins at 0, and a completion after a shared prompt where that ended."""
        kinds, grids = is_image.long(), iter(self._grids(self._wanted))

        def ask(row: torch.Tensor, kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            images = sum(1 for is_run, _ in groupby(kind.tolist()) if is_run)
            grid = torch.stack([next(grids) for _ in range(images)]).to(ids.device) if images else None
            places, delta = self.model.get_rope_index(row[None], mm_token_type_ids=kind[None], image_grid_thw=grid)
            return places[:, 0], delta  # (3, L), (1, 1)

        if plain is not None and plain.dim() == 2 and (mask is None or mask.dim() == 4):
            starts = [0, *((plain[0].diff() != 1).nonzero().flatten() + 1).tolist(), ids.size(1)]
            parts, delta = [], torch.zeros(1, 1, dtype=torch.long, device=ids.device)
            for start, end in zip(starts, starts[1:], strict=False):
                if plain[0, start] == 0:
                    places, delta = ask(ids[0, start:end], kinds[0, start:end])
                else:
                    places = (plain[0, start:end] + delta[0]).expand(3, -1)
                parts.append(places)
            return torch.cat([plain[None], torch.cat(parts, dim=1)[:, None]]), None
        text = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if mask is not None:
            text = (mask.long().cumsum(-1) - 1).clamp(min=0)
        axes, deltas = text.expand(3, -1, -1).clone(), []
        for number, row in enumerate(kept):
            axes[:, number, row], delta = ask(ids[number, row], kinds[number, row])
            deltas.append(delta)
        return torch.cat([text[None], axes]), torch.cat(deltas)


def choose_class(run: RunConfig, folder: str, config: Any) -> tuple[Any, Vision | None]:
    """The class of transformers that loads a checkpoint with a `vision_config`, and what it does with images; None for
    a class without a vision tower, or whose images the kit does not read. Raises BackendError if `model.vision` asks
    for what there is not."""
    known, wanted = config.model_type in WRITINGS, run.model.vision
    mapping = AutoModelForCausalLM._model_mapping
    text_only = type(config) in mapping and not _sees(mapping[type(config)])
    if wanted is not None and not (known if wanted else text_only):
        lacks = "images that the kit does not read" if wanted else "no class without its vision tower"
        raise BackendError(f"model.vision is {str(wanted).lower()}, but {config.model_type} has {lacks}: remove it")
    loader = AutoModelForImageTextToText if known and (wanted or not text_only) else AutoModelForCausalLM
    has_tower = known and _sees(loader._model_mapping[type(config)])
    return loader, Vision(folder, config, run.data.max_pixels) if has_tower else None


def _sees(kind: type) -> bool:
    return kind.__name__.endswith("ForConditionalGeneration")


def open_tokenizer(run: RunConfig, folder: str, tokenizer: Any) -> Any:
    """A checkpoint's tokenizer, which reads references to images if the run loads a vision tower."""
    config = AutoConfig.from_pretrained(folder)
    vision = choose_class(run, folder, config)[1] if hasattr(config, "vision_config") else None
    return tokenizer if vision is None else see(tokenizer, vision)


def attach(model: Any, tokenizer: Any, vision: Vision, freezes: bool = True) -> Any:
    """The tokenizer, which reads references to images from now on, and the model, bare or with an adapter, their ids.
    `freezes`: the tower of a bare model. A second call only exchanges `vision`, with what was encoded under it."""
    base = base_of(model).base_model
    if not hasattr(base, "check_prompt"):
        if freezes and base_of(model) is model:
            for name, value in base.named_parameters():
                value.requires_grad_(value.requires_grad and name.startswith(TEXT))
        reader = ImageReader(base, vision)
        base.forward, base.get_image_features, base.check_prompt = reader.forward, reader.features, reader.check_prompt
    reader = base.check_prompt.__self__
    if reader.vision is not vision:
        reader.vision = vision
        reader.kept.clear()
    return see(tokenizer, vision)


def adopt(model: Any, given: Any, args: Any) -> Any:
    """The tokenizer of a trainer that is called with a vision model, or its name, and TRL's `processing_class`: a
    processor, a tokenizer or None. It reads references to images if the kit reads the model's images; their size is
    limited as in the processor, or in the checkpoint's."""
    if hasattr(given, "vision"):  # of `load_policy`
        return given
    options = {"revision": (args.model_init_kwargs or {}).get("revision"), "trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(model, **options) if isinstance(model, str) else base_of(model).config
    name, tokenizer = config.name_or_path, getattr(given, "tokenizer", given)
    if tokenizer is None:  # as TRL loads it
        tokenizer = AutoTokenizer.from_pretrained(name, truncation_side="left", padding_side="left", **options)
    if template := getattr(given, "chat_template", None):
        tokenizer.chat_template = template
    if config.model_type not in WRITINGS:
        return tokenizer
    vision = Vision(name, config, None)
    if (processor := getattr(given, "image_processor", None)) is not None:
        vision.__dict__["processor"] = processor
    return see(tokenizer, vision)


def _add(position_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Positions (B, 1) or (4, B, 1), of the text first, with the rows' offsets (B, 1) on the other three axes."""
    text = position_ids if position_ids.dim() == 2 else position_ids[0]
    return torch.cat([text[None], (text + offsets).expand(3, -1, -1)])


def _bytes(states: States) -> int:
    return sum(part.numel() * part.itemsize for part in states)

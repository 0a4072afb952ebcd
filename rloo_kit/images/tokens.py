"""An image in a prompt: a reference in its text, and in its token ids an id beyond the vocabulary, once per state.

Both are the image's digest, so prompts that differ in an image only are different prompts wherever texts or ids are
compared. `see` makes a tokenizer read references; `model.attach` makes a model read the ids.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

from transformers.models.auto.image_processing_auto import AutoImageProcessor  # its public name asks for torchvision
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rloo_kit.errors import DataError
from rloo_kit.images.files import Picture
from rloo_kit.seams import IMAGE_REFERENCE

FIRST_ID = 2**60  # of images; a digest's 56 bits are added
REFERENCE = re.compile(IMAGE_REFERENCE)
LIBRARY: dict[str, Picture] = {}  # by digest: the pictures that this process has read


@dataclass(frozen=True)
class Writing:
    """How a class of models writes an image: `placeholder` in the chat template's text, which becomes `before`, the
    image's `token` as often as it has states, and `after`."""

    placeholder: str
    token: str
    before: str = ""
    after: str = ""


QWEN = Writing("<|image_pad|>", "<|image_pad|>")
GEMMA = Writing("<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n")
WRITINGS = {
    "qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "qwen3_vl_moe": QWEN, "qwen3_5": QWEN, "qwen3_5_moe": QWEN,
    "gemma3": GEMMA,
}  # fmt: skip


def refer(picture: Picture) -> str:
    """The reference to a picture, which this process finds by it from now on."""
    LIBRARY.setdefault(picture.digest, picture)
    return f"<|image:{picture.digest}|>"


def image_id(digest: str) -> int:
    """The id that stands for an image in token ids."""
    return FIRST_ID + int(digest, 16)


def digest_of(token: int) -> str:
    """The digest of the image that an id stands for."""
    return f"{token - FIRST_ID:014x}"


def find_picture(digest: str) -> Picture:
    """The picture with a digest; raises DataError if this process has not read it."""
    if digest not in LIBRARY:
        raise DataError(f"the image {digest} of a prompt was not read in this process: call load_data, which reads it")
    return LIBRARY[digest]


@dataclass(frozen=True)
class Vision:
    """What a checkpoint does with images.

    Attributes:
        folder: of the checkpoint, or its hub id. config: the model's.
        max_pixels: larger images are scaled down to it, where the model takes images of any size; None: to the
            checkpoint's.
    """

    tower: ClassVar = ("model.visual", "model.vision_tower", "model.multi_modal_projector")  # never in 4 bits
    folder: str
    config: Any
    max_pixels: int | None

    @cached_property
    def processor(self) -> Any:
        """transformers' image processor, on Pillow, the same with and without torchvision."""
        try:
            processor = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            problem = f"{self.folder} has no image processor that can be loaded ({str(error).splitlines()[0]})"
            raise DataError(f"{problem}: it needs the checkpoint's preprocessor_config.json") from error
        if "longest_edge" in (size := dict(processor.size)):
            most = size["longest_edge"] if self.max_pixels is None else self.max_pixels
            processor.size = {"shortest_edge": min(size["shortest_edge"], most), "longest_edge": most}
        return processor

    @property
    def writing(self) -> Writing:
        """How its prompts contain images; raises DataError for another class of models."""
        if (found := WRITINGS.get(self.config.model_type)) is None:
            raise DataError(
                f"the data has images, and {self.config.model_type} is a model whose images the kit does not read "
                f"(it reads those of {', '.join(WRITINGS)}): remove the column, or set model.name to one of those"
            )
        return found

    def count(self, picture: Picture) -> int:
        """Tokens of a picture in a prompt."""
        if (fixed := getattr(self.config, "mm_tokens_per_image", None)) is not None:
            return int(fixed)
        width, height = picture.size
        return int(self.processor.get_number_of_image_patches(height, width) // self.processor.merge_size**2)

    def target(self, picture: Picture) -> tuple[int, int]:
        """Width and height to which a processor that keeps shapes scales a picture."""
        (width, height), processor = picture.size, self.processor
        factor, size = processor.patch_size * processor.merge_size, processor.size
        return smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])[::-1]

    def scaled(self, picture: Picture) -> Any:
        """A picture of that size, which another program's processor of the same limits leaves as it is."""
        return picture.open().resize(self.target(picture), self.processor.resample)

    def pixels(self, picture: Picture) -> dict[str, Any]:
        """The model's inputs for one picture: pixel_values, and image_grid_thw where it has a grid."""
        return dict(self.processor(images=[picture.open()], return_tensors="pt"))


class ImageTokens:
    """What `see` adds to a tokenizer's class: references become ids of images, and back."""

    vision: Vision

    def __call__(self, text: Any = None, *more: Any, **options: Any) -> Any:
        rows = [text] if isinstance(text, str) else text
        found = [REFERENCE.findall(row) if isinstance(row, str) else [] for row in rows or ()]
        if not any(found):
            return super().__call__(text, *more, **options)  # type: ignore[misc]
        written, spelled = self.vision.writing, list(map(self.spell, rows))
        counts = {digest: self.vision.count(find_picture(digest)) for digest in set().union(*found)}
        encoded = super().__call__(spelled[0] if isinstance(text, str) else spelled, *more, **options)  # type: ignore[misc]
        pad = self.convert_tokens_to_ids(written.token)  # type: ignore[attr-defined]
        ids = encoded["input_ids"]
        for row, digests in zip(
            [ids] if isinstance(text, str) and isinstance(ids[0], int) else ids, found, strict=True
        ):
            wanted = [image_id(digest) for digest in digests for _ in range(counts[digest])]
            places = [place for place, token in enumerate(row) if token == pad]
            if len(places) != len(wanted):
                raise DataError(
                    f"a prompt contains {written.token}, which stands for an image: remove it from the text"
                )
            for place, token in zip(places, wanted, strict=True):
                row[place] = token
            if row[-1] >= FIRST_ID:
                raise DataError("a prompt ends in an image, and the answer has to follow a text: write one after it")
        return encoded

    def spell(self, text: str) -> str:
        """A text with the model's own tokens in place of references, as other programs read it."""
        written, count = self.vision.writing, self.vision.count

        def tokens(match: re.Match[str]) -> str:
            return f"{written.before}{written.token * count(find_picture(match[1]))}{written.after}"

        return REFERENCE.sub(tokens, text)

    def apply_chat_template(self, conversation: Any, *more: Any, tokenize: bool = True, **options: Any) -> Any:
        """The tokenizer's; parts of messages that are images become references."""
        is_batch = bool(conversation) and isinstance(conversation[0], (list, tuple))
        talks = conversation if is_batch else [conversation]
        images = [[part for message in talk for part in image_parts(message)] for talk in talks]
        if not any(images):
            return super().apply_chat_template(conversation, *more, tokenize=tokenize, **options)  # type: ignore[misc]
        as_dict = options.pop("return_dict", True)
        texts = []
        for talk, parts in zip(talks, images, strict=True):
            text = str(super().apply_chat_template(talk, *more, tokenize=False, **options))  # type: ignore[misc]
            pieces = text.split(self.vision.writing.placeholder)
            if len(pieces) != len(parts) + 1:
                raise DataError(
                    f"the chat template writes {len(pieces) - 1} images of the {len(parts)} in the messages"
                )
            references = [part["image"] for part in parts]
            texts.append("".join(piece for pair in zip(pieces, [*references, ""], strict=True) for piece in pair))
        if not tokenize:
            return texts if is_batch else texts[0]
        encoded = self(texts if is_batch else texts[0], add_special_tokens=False)
        return encoded if as_dict else encoded["input_ids"]

    def save_pretrained(self, folder: Any, *more: Any, **options: Any) -> Any:
        """The tokenizer's; the image processor is saved with it."""
        with suppress(DataError):
            self.vision.processor.save_pretrained(folder)
        return super().save_pretrained(folder, *more, **options)  # type: ignore[misc]

    def decode(self, token_ids: Any, *more: Any, **options: Any) -> Any:
        """The tokenizer's; an image is its reference."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, (list, tuple)) and ids and isinstance(ids[0], (list, tuple)):  # `batch_decode`
            return [self.decode(row, *more, **options) for row in ids]
        if isinstance(ids, int) or not any(isinstance(token, int) and token >= FIRST_ID for token in ids):
            return super().decode(token_ids, *more, **options)  # type: ignore[misc]
        texts = []
        for image, run in groupby(ids, key=lambda token: max(token, FIRST_ID)):
            is_text = image == FIRST_ID
            texts.append(super().decode(list(run), *more, **options) if is_text else f"<|image:{digest_of(image)}|>")  # type: ignore[misc]
        return "".join(texts)


def image_parts(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a message that refer to images."""
    content = message.get("content")
    yield from (one for one in content if REFERENCE.match(str(one.get("image")))) if isinstance(content, list) else ()


def see(tokenizer: Any, vision: Vision) -> Any:
    """The tokenizer, which reads references to images from now on."""
    kind = type(tokenizer)
    if not isinstance(tokenizer, ImageTokens):
        tokenizer.__class__ = type(kind.__name__, (ImageTokens, kind), {"__module__": kind.__module__})
    tokenizer.vision = vision
    return tokenizer

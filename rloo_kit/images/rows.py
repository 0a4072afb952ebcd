"""The images of data: columns `image` and `images`, or parts of messages, become references in the messages.

Columns follow TRL's convention; parts follow transformers' (`{"type": "image", "image": ...}`) or OpenAI's
(`{"type": "image_url", "image_url": {"url": ...}}`).
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from rloo_kit.data.sources import IMAGE_COLUMNS, DataSource
from rloo_kit.errors import DataError, excerpt
from rloo_kit.images.files import Picture, read_picture
from rloo_kit.images.tokens import REFERENCE, WRITINGS, refer

MARKER = "<image>"  # in a user's text: where the column's next image goes

Content = list[dict[str, Any]]  # parts of a message: texts, and images with their reference, None for a place alone


def write(source: DataSource) -> DataSource:
    """The source with prompts that refer to its images; raises DataError, with file and line, for an image that cannot
    be read or has no place in its prompt."""
    file, prompts = Path(source.name), []
    folder = file.parent if file.is_file() else Path()
    values = {name: iter(column) for name, column in source.images.items()}
    for row, prompt in enumerate(source.prompts):
        try:
            images = _read_columns({name: next(column) for name, column in values.items()}, folder)
            prompts.append(write_prompt(prompt, images, folder))
        except DataError as error:
            raise DataError(f"{source.where(row)}: {error}") from error
    return replace(source, prompts=prompts, images={})


def write_rows(rows: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of a dataset, as a trainer gets them, with prompts that refer to their images; raises DataError for images
    that the model does not see."""
    name = "images" if "images" in rows[0] else "image"  # as TRL chooses
    written: list[dict[str, Any]] = []
    before: Any = None
    for row in rows:
        found = prompt, images = row["prompt"], list_images(row.get(name))
        if images and not hasattr(tokenizer, "vision"):
            known = f"a model whose images the kit reads ({', '.join(WRITINGS)})"
            raise DataError(f"the dataset has images in column {name}: drop the column, or train {known}")
        if images and isinstance(prompt, str):
            problem = f"a row has {len(images)} images and its prompt is a text: {excerpt(prompt)}"
            raise DataError(f'{problem}. Give messages: [{{"role": "user", "content": ...}}]')
        if found == before:  # the samples of a prompt: its images are encoded once
            row = row | {"prompt": written[-1]["prompt"]}
        elif not isinstance(prompt, str):
            row = row | {"prompt": write_prompt(prompt, images if name in row else None, Path())}
        written, before = [*written, row], found
    return written


def undecode(table: Any, kept: list[str], name: str) -> Any:
    """A `datasets.Dataset` with files of images rather than pictures, which would take the memory of all their pixels.
    Raises DataError for one in the columns `kept`, which are in no prompt."""

    def find_images(feature: Any) -> Iterator[Any]:
        if isinstance(feature, datasets.Image):
            yield feature
        for inner in feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]:
            yield from find_images(inner) if inner is not None else ()

    features = copy.deepcopy(table.features)
    if found := next((column for column in kept if any(find_images(features[column]))), None):
        wanted = f"rename it ({' or '.join(IMAGE_COLUMNS)}), or remove it"
        raise DataError(f"{name}: column '{found}' contains images, which would be in no prompt: {wanted}")
    for image in find_images(features):
        image.decode = False
    info = datasets.DatasetInfo(features=datasets.Features(features))
    return datasets.Dataset(table.with_format("arrow")[:], info=info)


def list_images(value: Any) -> list[Any]:
    """The images of a row's value: one, a list of them, or none."""
    items = value if isinstance(value, list | tuple) else [value]
    empty = (item is None or item == "" or (isinstance(item, float) and math.isnan(item)) for item in items)  # pandas'
    return [item for item, is_empty in zip(items, empty, strict=True) if not is_empty]


def _read_columns(values: Mapping[str, Any], folder: Path) -> list[Picture] | None:
    """The images of a row, from its values by the column's name; None without such a column."""
    found = {name: images for name, value in values.items() if (images := list_images(value))}
    if len(found) > 1:
        raise DataError(f"the columns {' and '.join(found)} both have images: remove one of them")
    for name, images in found.items():
        try:
            return [read_picture(image, folder) for image in images]
        except DataError as error:
            raise DataError(f"column '{name}': {error} (rename the column if it is not for images)") from error
    return [] if values else None


def write_prompt(prompt: Any, images: list[Any] | None, folder: Path) -> Any:
    """A prompt, text or messages, with references to images in their places: the image parts of its messages, else the
    markers in the user's texts, else before the first of these. `images`: those of the row, for places without one;
    None if it has no column of images, so that a marker is text."""
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return prompt  # refused where prompts are rendered
    contents = [_read_content(message.get("content"), folder) for message in messages]
    asked = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if images is not None and not any(map(_has_images, contents)):
        for place in asked:
            contents[place] = [piece for part in contents[place] for piece in _split(part)]
        if asked and not any(map(_has_images, contents)):
            contents[asked[0]] = [*({"type": "image", "image": None} for _ in images), *contents[asked[0]]]
    parts = [part for content in contents for part in content]
    if written := next(filter(None, (REFERENCE.search(part.get("text", "")) for part in parts)), None):
        raise DataError(f"the prompt contains {written[0]}, which stands for an image: remove it")
    places = [part for part in parts if part.get("image", "") is None]
    if len(places) != len(images or ()):
        found = f"the row's column has {len(images or ())} images, its prompt has places for {len(places)}"
        raise DataError(f"{found} ({MARKER}, or image parts without an image of their own): make the numbers equal")
    for part, image in zip(places, images or (), strict=True):
        part["image"] = _refer(image, folder)
    if isinstance(prompt, str) and not images:
        return prompt
    return [
        message | {"content": content if _has_images(content) else "".join(part["text"] for part in content)}
        if isinstance(message.get("content"), str | list)
        else message
        for message, content in zip(messages, contents, strict=True)
    ]


def _read_content(content: Any, folder: Path) -> Content:
    """The parts of a message's content."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_read_part(part, folder) for part in content] if isinstance(content, list) else []


def _read_part(part: Any, folder: Path) -> dict[str, Any]:
    """A part of a message, without the keys that Arrow adds."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url" and (url := part.get("image_url")):
        image = url.get("url") if isinstance(url, dict) else url
    elif kind == "image":
        encoded = part.get("base64")
        payloads = [part.get(key) for key in ("image", "path", "url", "bytes")]
        payloads.append(encoded and f"data:image/png;base64,{encoded}")
        image = next((payload for payload in payloads if payload is not None), None)
    else:
        raise DataError(f"a message has a part that is no text and no image: {excerpt(part)}")
    return {"type": "image", "image": None if image is None else _refer(image, folder)}


def _refer(image: Any, folder: Path) -> str:
    return refer(image if isinstance(image, Picture) else read_picture(image, folder))


def _split(part: dict[str, Any]) -> Content:
    """A text's parts, with places at its markers."""
    first, *rest = ([{"type": "text", "text": piece}] if piece else [] for piece in part["text"].split(MARKER))
    return [*first, *(one for piece in rest for one in ({"type": "image", "image": None}, *piece))]


def _has_images(content: Content) -> bool:
    return any(part["type"] == "image" for part in content)

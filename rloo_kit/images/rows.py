"""The images of data: columns `image` and `images`, or parts of messages, become references in the messages.

Columns follow TRL's convention; parts follow transformers' (`{"type": "image", "image": ...}`) or OpenAI's
(`{"type": "image_url", "image_url": {"url": ...}}`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_kit.data.sources import IMAGE_COLUMNS, DataSource
from rloo_kit.errors import DataError, excerpt
from rloo_kit.images.files import read_picture
from rloo_kit.images.tokens import REFERENCE, refer

MARKER = "<image>"  # in a text: where the next image goes


def write(source: DataSource, columns: Mapping[str, Iterable[Any]]) -> DataSource:
    """The source with prompts that refer to its images, by the column's name; raises DataError, with file and line, for
    an image that cannot be read or has no place in its prompt."""
    folder = Path(source.name).parent  # of a file; "." for what is no file
    prompts = list(source.prompts)
    for name, values in columns.items() or [("images", [None] * len(prompts))]:
        for row, value in enumerate(values):
            try:
                prompts[row] = write_prompt(prompts[row], list_images(value, name), folder)
            except DataError as error:
                raise DataError(f"{source.where(row)}: {error}") from error
    return replace(source, prompts=prompts)


def write_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a dataset, as a trainer gets them, with prompts that refer to their images."""
    images = [[image for name in IMAGE_COLUMNS for image in list_images(row.get(name), name)] for row in rows]
    pairs = zip(rows, images, strict=True)
    return [row | {"prompt": write_prompt(row["prompt"], found, Path())} for row, found in pairs]


def undecoded(table: Any, name: str) -> Any:
    """A column of images of a `datasets.Dataset`: the files' bytes rather than pictures, which would take the memory of
    all their pixels."""
    import datasets

    feature = table.features[name]
    if isinstance(feature, datasets.Image):
        table = table.cast_column(name, datasets.Image(decode=False))
    elif isinstance(getattr(feature, "feature", None), datasets.Image):
        table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return table[name]


def list_images(value: Any, name: str) -> list[Any]:
    """The images of one row in the column `name`."""
    if isinstance(value, (list, tuple)):
        return [item for item in value if item is not None]
    return [] if value is None or value == "" else [value]


def write_prompt(prompt: Any, images: list[Any], folder: Path) -> Any:
    """A prompt, text or messages, whose images are references; `images`: those that are not in its messages, for the
    placeholders there, or before the first message of the user."""
    left = list(images)

    def take(value: Any) -> dict[str, str]:
        if value is None and not left:
            raise DataError(f"the prompt has more places for images than the {len(images)} of the row")
        return {"type": "image", "image": refer(read_picture(left.pop(0) if value is None else value, folder))}

    def split(text: str) -> list[dict[str, Any]]:
        """A text's parts, at its markers."""
        if found := REFERENCE.search(text):
            raise DataError(f"the prompt contains {found[0]}, which stands for an image: remove it")
        pieces = text.split(MARKER) if left and text.count(MARKER) == len(left) else [text]
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            parts += [take(None)] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        return parts

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return prompt  # refused where prompts are rendered
    written = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = split(content) if message.get("role") == "user" else content
        elif isinstance(content, list):
            pairs = [_read_part(part) for part in content]
            content = [one for kind, given in pairs for one in (split(given) if kind == "text" else [take(given)])]
        written.append({**message, "content": content})
    if left:
        asked = next((message for message in written if message.get("role") == "user"), None)
        if asked is None or any(part["type"] == "image" for part in _parts(asked["content"])):
            raise DataError(
                f"the row has {len(images)} images, and its prompt has places for {len(images) - len(left)}"
            )
        asked["content"] = [*(take(None) for _ in images), *_parts(asked["content"])]
    for message in written:
        parts = _parts(message["content"])
        if isinstance(message["content"], list) and all(part["type"] == "text" for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
    return written if any(isinstance(message["content"], list) for message in written) else prompt


def _read_part(part: Any) -> tuple[str, Any]:
    """The kind, "text" or "image", and the payload of a part of a message; None for an image's place alone."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return "text", part["text"]
    if kind == "image":
        payloads = [part.get(name) for name in ("image", "path", "url", "base64", "bytes")]
        return "image", next((payload for payload in payloads if payload is not None), None)
    if kind == "image_url" and part.get("image_url"):
        url = part["image_url"]
        return "image", url.get("url") if isinstance(url, dict) else url
    raise DataError(f"a message has a part that is no text and no image: {excerpt(part)}")


def _parts(content: Any) -> list[dict[str, Any]]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []

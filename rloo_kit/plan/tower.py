"""The vision tower of a model, which turns an image into tokens: its shape, from `config.json` alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QWEN_VL = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
_QWEN_KEYS = ["depth", "patch_size", "spatial_merge_size", "temporal_patch_size"]
_KEYS = {
    "gemma3": ["hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "image_size"],
    "qwen2_vl": [*_QWEN_KEYS, "hidden_size"],
    "qwen2_5_vl": [*_QWEN_KEYS, "hidden_size", "intermediate_size", "out_hidden_size"],
}
_KEYS |= dict.fromkeys(("qwen3_vl", "qwen3_5"), [*_KEYS["qwen2_5_vl"], "num_position_embeddings"])


@dataclass(frozen=True)
class Tower:
    """A vision tower with the layers that bring its output to the width of the language model; widths in elements.

    Attributes:
        width: of a patch. out_size: of a token, that of the language model.
        block: the matrices of one block, (output rows, input columns). merger: those that make a token of its patches.
        levels: features of a token: the last block's, and those that the first layers of the language model add.
        other_weights: in no matrix: norms, biases, embeddings.
        patch: width in pixels. merge: a token is merge x merge patches.
        image_size: pixels to which every image is resized; None keeps its shape, within `data.max_pixels`.
        is_optional: loaded only with `model.vision: true`.
    """

    width: int
    out_size: int
    depth: int
    block: tuple[tuple[int, int], ...]
    merger: tuple[tuple[int, int], ...]
    levels: int
    other_weights: int
    patch: int
    merge: int
    image_size: int | None = None
    is_optional: bool = False

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(output rows, input columns, count) of the matrices."""
        blocks = [(rows, columns, self.depth) for rows, columns in self.block]
        return [*blocks, *((rows, columns, self.levels) for rows, columns in self.merger)]

    @property
    def num_weights(self) -> int:
        """All weights."""
        return sum(rows * columns * count for rows, columns, count in self.matrices) + self.other_weights

    def image_tokens(self, max_pixels: int) -> int:
        """Tokens of the largest image.

        >>> TOWERS["qwen3-vl-4b"].image_tokens(512 * 512)
        256
        """
        pixels = self.image_size**2 if self.image_size else max_pixels
        return max(pixels // (self.patch * self.merge) ** 2, 1)


def tower_of_config(config: Mapping[str, Any]) -> Tower | None:
    """The tower described by the content of a `config.json`; None if it has none, or one that is not known."""
    kind, vision = str(config.get("model_type")), config.get("vision_config") or {}
    if not all(isinstance(vision.get(key), int) for key in _KEYS.get(kind, [""])):
        return None
    if kind == "gemma3":
        text = config["text_config"]["hidden_size"]
        return _siglip(vision, text, round((config.get("mm_tokens_per_image") or 256) ** 0.5))
    if kind == "qwen2_vl":
        width, out_size = vision.get("embed_dim") or 1280, vision["hidden_size"]
        wide = int(width * (vision.get("mlp_ratio") or 4))
    else:
        width, out_size, wide = (vision[key] for key in ("hidden_size", "out_hidden_size", "intermediate_size"))
    is_gated, is_new = kind == "qwen2_5_vl", kind in ("qwen3_vl", "qwen3_5")  # new: learnt positions, more biases
    norm = width if is_gated else 2 * width  # a bias in all others
    merged = width * vision["spatial_merge_size"] ** 2
    deep = len(vision.get("deepstack_visual_indexes") or ())
    biases = 5 * width + wide * (2 if is_gated else 1)
    others = vision["depth"] * (2 * norm + biases) + norm + deep * 2 * merged + (1 + deep) * (merged + out_size)
    others += 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2 * width
    others += width * (1 + vision["num_position_embeddings"]) if is_new else 0
    return Tower(
        width=width,
        out_size=out_size,
        depth=vision["depth"],
        block=((3 * width, width), (width, width), *[(wide, width)] * (2 if is_gated else 1), (width, wide)),
        merger=((merged, merged), (out_size, merged)),
        levels=1 + deep,
        other_weights=others,
        patch=vision["patch_size"],
        merge=vision["spatial_merge_size"],
        is_optional=kind == "qwen3_5",
    )


def _siglip(vision: Mapping[str, Any], out_size: int, side: int) -> Tower:
    """Gemma3's, which makes side x side tokens of every image."""
    width, wide = vision["hidden_size"], vision["intermediate_size"]
    patches = vision["image_size"] // vision["patch_size"]
    others = vision["num_hidden_layers"] * (9 * width + wide) + width * (1 + patches**2 + 3 * vision["patch_size"] ** 2)
    return Tower(
        width=width,
        out_size=out_size,
        depth=vision["num_hidden_layers"],
        block=(*[(width, width)] * 4, (wide, width), (width, wide)),
        merger=(),
        levels=1,
        other_weights=others + 3 * width + width * out_size,  # the last norms, and the projection
        patch=vision["patch_size"],
        merge=patches // side,
        image_size=vision["image_size"],
    )


def _qwen(kind: str, width: int, depth: int, out_size: int, deep: int = 0) -> Tower:
    """Qwen3-VL's and Qwen3.5's."""
    sizes = {"hidden_size": width, "intermediate_size": {1152: 4304}.get(width, 4 * width), "depth": depth}
    pixels = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
    found = sizes | pixels | {"out_hidden_size": out_size, "deepstack_visual_indexes": list(range(deep))}
    tower = tower_of_config({"model_type": kind, "vision_config": found})
    assert tower is not None
    return tower


# Of the models' own `config.json`.
TOWERS = {
    "qwen3-vl-2b": _qwen("qwen3_vl", 1024, 24, 2048, 3),
    "qwen3-vl-4b": _qwen("qwen3_vl", 1024, 24, 2560, 3),
    "qwen3-vl-8b": _qwen("qwen3_vl", 1152, 27, 4096, 3),
    "qwen3.5-0.8b": _qwen("qwen3_5", 768, 12, 1024),
    "qwen3.5-4b": _qwen("qwen3_5", 1024, 24, 2560),
    "qwen3.5-9b": _qwen("qwen3_5", 1152, 27, 4096),
    "qwen3.5-27b": _qwen("qwen3_5", 1152, 27, 5120),
}

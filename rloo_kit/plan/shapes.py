"""The shape of a model, which gives the size of its weights and cache, from `config.json` alone.

Source of the tables: the models' own `config.json`; the 2507 models share the shapes of Qwen3.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.model_names import SMOLLM2
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.runs.find import find_in_cache, hub_cache, read_adapter

HAS_KERNELS = ("qwen3", "qwen2", "llama", "mistral")  # Unsloth's own kernels; it compiles the others
SUPPORTED = (*HAS_KERNELS, "smollm3", "qwen3_5")  # the same MLP; attention differs by norms, biases, gates, delta nets
QWEN3_ROWS, QWEN3_5_ROWS, LLAMA3_ROWS = 151936, 248320, 128256
BNB_ENDING = "-bnb-4bit"
DYNAMIC_ENDING = f"-unsloth{BNB_ENDING}"  # Unsloth's copies that keep some layers in 16 bit
_ENDINGS = (DYNAMIC_ENDING, BNB_ENDING, "-instruct-2507", "-thinking-2507", "-base")
_KEYS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
DELTA_KEYS = [  # the fields of DeltaNet, without its layers
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
]  # fmt: skip


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta nets in place of attention in some `layers` of Qwen3.5: a state of fixed size, no KV cache."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    kernel: int = 4

    @property
    def conv_size(self) -> int:
        """Width of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family; widths in elements.

    Attributes:
        tied: the head is the embedding. qk_norm: norms of queries and keys, as in Qwen3. qkv_bias: as in Qwen2.
        delta: layers without attention; with it, the others gate their attention. has_kernels: Unsloth has kernels for
            this type.
        is_quantised: the checkpoint has 4-bit weights. kept: patterns of modules that it keeps in 16 bit.
        source: where the shape was read, for display.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qk_norm: bool = True
    qkv_bias: bool = False
    delta: DeltaNet | None = None
    has_kernels: bool = True
    is_quantised: bool = False
    kept: tuple[str, ...] = ()
    source: str = "given"

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, equal to that of the value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_attention(self) -> int:
        """Layers with attention, and so with a KV cache."""
        return self.num_layers - (len(self.delta.layers) if self.delta else 0)

    @property
    def matrices(self) -> list[tuple[tuple[int, ...], dict[str, tuple[int, int]]]]:
        """Of each kind of layer the places, and one layer's matrices by name: (output rows, input columns)."""
        hidden, wide, query, kv = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        mlp = {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
        attention = {
            "self_attn.q_proj": (query if self.delta is None else 2 * query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
        }
        if (net := self.delta) is None:
            return [(tuple(range(self.num_layers)), attention | mlp)]
        value, heads = net.value_heads * net.value_dim, net.value_heads
        rows = {"in_proj_qkv": net.conv_size, "in_proj_z": value, "in_proj_b": heads, "in_proj_a": heads}
        delta = {f"linear_attn.{name}": (count, hidden) for name, count in rows.items()}
        others = tuple(layer for layer in range(self.num_layers) if layer not in net.layers)
        return [(others, attention | mlp), (net.layers, delta | {"linear_attn.out_proj": (hidden, value)} | mlp)]

    @property
    def body_weights(self) -> int:
        """Weights in the matrices of all layers, which 4-bit loading quantises."""
        return sum(len(places) * rows * columns for places, one in self.matrices for rows, columns in one.values())

    @property
    def vector_weights(self) -> int:
        """Weights of norms, biases and convolutions, the last norm included."""
        attention = 2 * self.head_dim if self.qk_norm else 0
        attention += self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        total = (2 * self.num_layers + 1) * self.hidden_size + self.num_attention * attention
        if (net := self.delta) is not None:
            total += len(net.layers) * (net.conv_size * net.kernel + 2 * net.value_heads + net.value_dim)
        return total

    @property
    def table_weights(self) -> int:
        """Weights of the embedding, and of the head if it is not tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def num_weights(self) -> int:
        """All weights, each counted once."""
        return self.body_weights + self.vector_weights + self.table_weights

    @property
    def size(self) -> str:
        """`num_weights` for display: "4.02B parameters", "0.484M parameters"."""
        count = self.num_weights
        return f"{count / 1e9:.3g}B parameters" if count >= 1e9 else f"{count / 1e6:.3g}M parameters"

    @property
    def cache_elements(self) -> int:
        """Elements of the KV cache for one token."""
        return 2 * self.num_attention * self.kv_size

    def is_kept(self, module: str) -> bool:
        """Whether a quantised checkpoint keeps `module` ("model.layers.3.mlp.up_proj") in 16 bit.

        As in transformers 5: a pattern matches from the start, or the name ends with it.
        """
        return any(re.match(pattern, module) or module.endswith(pattern) for pattern in self.kept)


def _qwen3_5(hidden: int, wide: int, layers: int, heads: int, value_heads: int, tied: bool) -> ModelShape:
    delta = DeltaNet(tuple(layer for layer in range(layers) if (layer + 1) % 4), 16, value_heads)
    sizes = hidden, wide, layers, heads, min(heads // 4, 4), 256, QWEN3_5_ROWS, tied
    return ModelShape(*sizes, delta=delta, has_kernels=False)


PUBLISHED = {
    "0.6b": ModelShape(1024, 3072, 28, 16, 8, 128, QWEN3_ROWS, True),
    "1.7b": ModelShape(2048, 6144, 28, 16, 8, 128, QWEN3_ROWS, True),
    "4b": ModelShape(2560, 9728, 36, 32, 8, 128, QWEN3_ROWS, True),
    "8b": ModelShape(4096, 12288, 36, 32, 8, 128, QWEN3_ROWS, False),
    "14b": ModelShape(5120, 17408, 40, 40, 8, 128, QWEN3_ROWS, False),
    "32b": ModelShape(5120, 25600, 64, 64, 8, 128, QWEN3_ROWS, False),
}
_DISTILL = "deepseek-r1-distill"
NAMED = {f"qwen3-{size}": shape for size, shape in PUBLISHED.items()} | {
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, 8, 16, True),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, 8, 16, True),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, 16, 32, True),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, 16, 32, False),
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, 24, 48, False),
    "smollm3-3b": ModelShape(2048, 11008, 36, 16, 4, 128, LLAMA3_ROWS, True, qk_norm=False, has_kernels=False),
    f"{_DISTILL}-qwen-1.5b": ModelShape(1536, 8960, 28, 12, 2, 128, QWEN3_ROWS, False, qk_norm=False, qkv_bias=True),
    f"{_DISTILL}-qwen-7b": ModelShape(3584, 18944, 28, 28, 4, 128, 152064, False, qk_norm=False, qkv_bias=True),
    f"{_DISTILL}-qwen-14b": ModelShape(5120, 13824, 48, 40, 8, 128, 152064, False, qk_norm=False, qkv_bias=True),
    f"{_DISTILL}-qwen-32b": ModelShape(5120, 27648, 64, 40, 8, 128, 152064, False, qk_norm=False, qkv_bias=True),
    f"{_DISTILL}-llama-8b": ModelShape(4096, 14336, 32, 32, 8, 128, LLAMA3_ROWS, False, qk_norm=False),
    "deepseek-r1-0528-qwen3-8b": PUBLISHED["8b"],
}
# Both embedded models, as in embedded.cold_start, which imports torch (a test compares).
EMBEDDED = ModelShape(128, 256, 3, 4, 2, 32, 320, True, source="the embedded model")
SMOLLM2_SHAPE = ModelShape(576, 1536, 30, 9, 3, 64, 49152, True, qk_norm=False, source="SmolLM2-135M-Instruct")
EMBEDDED_ROWS = {"compact": 320, "qwen3": QWEN3_ROWS}


def find_shape(run: RunConfig) -> ModelShape:
    """The shape of `run.model`: built in, in a folder, in the Hugging Face cache, or published. Raises ConfigError if
    it is none of these, or not a dense decoder of a supported type."""
    if run.model.is_embedded:
        return replace(EMBEDDED, vocab_size=EMBEDDED_ROWS[run.model.vocabulary])
    if run.model.name in SMOLLM2:
        return SMOLLM2_SHAPE
    return _find_by_name(run.model.name)


def _find_by_name(name: str, depth: int = 0) -> ModelShape:
    folder = Path(name).expanduser()
    file = folder / "config.json" if folder.is_dir() else find_in_cache(name)
    if file is not None and file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            fix = "download the model again, or correct model.name"
            raise ConfigError(f"{file} cannot be read ({error}); {fix}") from None
        return shape_of_config(config, str(file))
    if folder.is_dir():
        base = read_adapter(folder).get("base_model_name_or_path")
        if not base or depth:
            raise ConfigError(
                f"model.name is {name}, a folder without config.json (or an adapter that names its base model), so its "
                "memory cannot be planned; set a folder written by save_pretrained, or a hub id"
            )
        return _find_by_name(str(base), depth + 1)
    short = name.rpartition("/")[2].lower()  # from any publisher, with nothing else in the name
    is_quantised = short.endswith(BNB_ENDING)
    for ending in _ENDINGS:
        short = short.removesuffix(ending)
    if short in NAMED:
        return replace(NAMED[short], is_quantised=is_quantised, source="the published shapes")
    raise ConfigError(
        f"model.name is {name}, which is neither a folder nor in the Hugging Face cache ({hub_cache()}), nor a "
        "known shape (Qwen3, Qwen3.5, SmolLM3-3B, DeepSeek-R1-Distill), so its memory cannot be planned. Download its "
        f"config.json first: hf download {name} config.json"
    )


def shape_of_config(config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
    """The shape described by the content of a `config.json`. Raises ConfigError if a key is missing, or if the model
    has experts or unsupported layers."""
    text = config.get("text_config") or config
    kind = str(text.get("model_type") or config.get("model_type")).removesuffix("_text")
    needed = [*_KEYS, "layer_types", *DELTA_KEYS] if kind == "qwen3_5" else _KEYS
    missing = [key for key in needed if not isinstance(text.get(key), int | list)]
    has_experts = any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if kind not in SUPPORTED or has_experts or missing:
        why = f"lacks {', '.join(missing)}" if kind in SUPPORTED and missing else f"is of the type {kind!r}"
        raise ConfigError(
            f"the memory of this model cannot be planned: {source} {why}; supported are the dense models "
            f"{', '.join(SUPPORTED)}. Training continues without a plan; set rollout.rows yourself"
        )
    quantisation = text.get("quantization_config") or config.get("quantization_config") or {}
    heads, delta = text["num_attention_heads"], None
    if kind == "qwen3_5":
        places = (place for place, one in enumerate(text["layer_types"]) if one == "linear_attention")
        delta = DeltaNet(tuple(places), *(text[key] for key in DELTA_KEYS))
    return ModelShape(
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab_size=text["vocab_size"],
        tied=bool(text.get("tie_word_embeddings", kind == "smollm3")),  # the default of its class in transformers
        qk_norm=kind in ("qwen3", "qwen3_5"),
        qkv_bias=kind == "qwen2",
        delta=delta,
        has_kernels=kind in HAS_KERNELS,
        is_quantised=bool(quantisation.get("load_in_4bit") or quantisation.get("_load_in_4bit")),
        kept=tuple(one.replace(".language_model", "") for one in quantisation.get("llm_int8_skip_modules") or ()),
        source=source,
    )

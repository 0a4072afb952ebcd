"""The shape of a model, which gives the size of its weights and cache, from `config.json` alone.

Source of the tables: the models' own `config.json`; the 2507 models share the shapes of Qwen3.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.config.model_names import SMOLLM2
from rloo_kit.config.run import RunConfig
from rloo_kit.errors import ConfigError
from rloo_kit.plan.tower import QWEN_VL, TOWERS, Tower, tower_of_config
from rloo_kit.runs.find import find_in_cache, hub_cache, read_adapter

HAS_KERNELS = ("qwen3", "qwen2", "llama", "mistral")  # Unsloth's own kernels; it compiles the others
# The same MLP; attention differs by norms, biases, gates, delta nets.
SUPPORTED = (*HAS_KERNELS, "smollm3", "qwen3_5", "gemma3", *QWEN_VL)
QWEN3_ROWS, QWEN3_5_ROWS, LLAMA3_ROWS = 151936, 248320, 128256
BNB_ENDING = "-bnb-4bit"
DYNAMIC_ENDING = f"-unsloth{BNB_ENDING}"  # Unsloth's copies that keep some layers in 16 bit
_ENDINGS = (DYNAMIC_ENDING, BNB_ENDING, "-instruct-2507", "-thinking-2507", "-instruct", "-thinking", "-base")
# Keys that Gemma3's own `config.json` leaves to the defaults of its class.
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
_KEYS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family; widths in elements.

    Attributes:
        tied: the head is the embedding. qk_norm: norms of queries and keys, as in Qwen3. qkv_bias: as in Qwen2.
        is_hybrid: Qwen3.5, three of four layers of which are delta nets: counted from above, as gated attention.
        is_gemma3: four norms a layer, and sliding windows, which are counted as full.
        has_kernels: Unsloth has kernels for this type.
        is_quantised: the checkpoint has 4-bit weights. source: where the shape was read, for display.
        tower: turns images into tokens; None if the model has none, or the run does not load it.
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
    is_hybrid: bool = False
    is_gemma3: bool = False
    has_kernels: bool = True
    is_quantised: bool = False
    source: str = "given"
    tower: Tower | None = None

    @property
    def num_norms(self) -> int:
        """Norms of a layer's width."""
        return 4 if self.is_gemma3 else 2

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, equal to that of the value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """One layer's matrices by name: (output rows, input columns)."""
        hidden, wide, query, kv = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        return {
            "self_attn.q_proj": (3 * query if self.is_hybrid else query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }

    @property
    def body_weights(self) -> int:
        """Weights in the matrices of all layers, which 4-bit loading quantises."""
        return self.num_layers * sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def vector_weights(self) -> int:
        """Weights of norms and biases, the last norm included."""
        of_a_layer = self.num_norms * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        of_a_layer += self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        return self.num_layers * of_a_layer + self.hidden_size

    @property
    def table_weights(self) -> int:
        """Weights of the embedding, and of the head if it is not tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def num_weights(self) -> int:
        """All weights of the decoder, each counted once."""
        return self.body_weights + self.vector_weights + self.table_weights

    @property
    def size(self) -> str:
        """`num_weights` for display: "4.02B parameters", "0.484M parameters"."""
        count = self.num_weights
        return f"{count / 1e9:.3g}B parameters" if count >= 1e9 else f"{count / 1e6:.3g}M parameters"

    @property
    def cache_elements(self) -> int:
        """Elements of the KV cache for one token."""
        return 2 * self.num_layers * self.kv_size


def _qwen3_5(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, tied: bool) -> ModelShape:
    sizes = hidden, wide, layers, heads, kv_heads, 256, QWEN3_5_ROWS, tied
    return ModelShape(*sizes, is_hybrid=True, has_kernels=False)


PUBLISHED = {
    "0.6b": ModelShape(1024, 3072, 28, 16, 8, 128, QWEN3_ROWS, True),
    "1.7b": ModelShape(2048, 6144, 28, 16, 8, 128, QWEN3_ROWS, True),
    "4b": ModelShape(2560, 9728, 36, 32, 8, 128, QWEN3_ROWS, True),
    "8b": ModelShape(4096, 12288, 36, 32, 8, 128, QWEN3_ROWS, False),
    "14b": ModelShape(5120, 17408, 40, 40, 8, 128, QWEN3_ROWS, False),
    "32b": ModelShape(5120, 25600, 64, 64, 8, 128, QWEN3_ROWS, False),
}
NAMED = {f"qwen3-{size}": shape for size, shape in PUBLISHED.items()} | {
    "qwen3-vl-2b": replace(PUBLISHED["1.7b"], has_kernels=False),
    "qwen3-vl-4b": replace(PUBLISHED["4b"], has_kernels=False),
    "qwen3-vl-8b": replace(PUBLISHED["8b"], has_kernels=False),
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, 8, 2, True),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, 8, 2, True),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, 16, 4, True),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, 16, 4, False),
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, 24, 4, False),
    "smollm3-3b": ModelShape(2048, 11008, 36, 16, 4, 128, LLAMA3_ROWS, True, qk_norm=False, has_kernels=False),
}
# Both embedded models, as in embedded.cold_start, which imports torch (a test compares).
EMBEDDED = ModelShape(128, 256, 3, 4, 2, 32, 320, True, source="the embedded model")
SMOLLM2_SHAPE = ModelShape(576, 1536, 30, 9, 3, 64, 49152, True, qk_norm=False, source="SmolLM2-135M-Instruct")


def find_shape(run: RunConfig) -> ModelShape:
    """The shape of `run.model`: built in, in a folder, in the Hugging Face cache, or published. Raises ConfigError if
    it is none of these, or not a dense decoder of a supported type."""
    if run.model.is_embedded:
        return EMBEDDED
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
        tower = TOWERS.get(short)
        return replace(NAMED[short], is_quantised=is_quantised, source="the published shapes", tower=tower)
    raise ConfigError(
        f"model.name is {name}, which is neither a folder nor in the Hugging Face cache ({hub_cache()}), nor a "
        "known shape (Qwen3, Qwen3-VL, Qwen3.5, SmolLM3-3B), so its memory cannot be planned. Download its "
        f"config.json first: hf download {name} config.json"
    )


def shape_of_config(config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
    """The shape described by the content of a `config.json`. Raises ConfigError if a key is missing, or if the model
    has experts or unsupported layers."""
    text = config.get("text_config") or config
    kind = str(text.get("model_type") or config.get("model_type")).removesuffix("_text")
    text = {**_GEMMA3, **text} if kind == "gemma3" else text
    missing = [key for key in _KEYS if not isinstance(text.get(key), int)]
    has_experts = any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if kind not in SUPPORTED or has_experts or missing:
        why = f"lacks {', '.join(missing)}" if kind in SUPPORTED and missing else f"is of the type {kind!r}"
        raise ConfigError(
            f"the memory of this model cannot be planned: {source} {why}; supported are the dense models "
            f"{', '.join(SUPPORTED)}. Training continues without a plan; set rollout.rows yourself"
        )
    quantisation = text.get("quantization_config") or config.get("quantization_config") or {}
    heads = text["num_attention_heads"]
    is_tied = text.get("tie_word_embeddings", kind in ("smollm3", "gemma3"))  # the default of its class in transformers
    return ModelShape(
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab_size=text["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", is_tied)),
        qk_norm=kind in ("qwen3", "qwen3_5", "qwen3_vl", "gemma3"),
        qkv_bias=kind in ("qwen2", "qwen2_vl", "qwen2_5_vl"),
        is_hybrid=kind == "qwen3_5",
        is_gemma3=kind == "gemma3",
        has_kernels=kind in HAS_KERNELS,
        is_quantised=bool(quantisation.get("load_in_4bit") or quantisation.get("_load_in_4bit")),
        source=source,
        tower=tower_of_config(config),
    )

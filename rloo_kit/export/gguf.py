"""Write GGUF, the format of llama.cpp, Ollama and LM Studio: merged weights, tokenizer and chat template in one file.

Tensors are written one by one with the `gguf` package, with the names, types and keys of llama.cpp's converter.
"""

from pathlib import Path
from typing import Any

import numpy as np

from rloo_kit.errors import ExportError
from rloo_kit.export.merge import Weight
from rloo_kit.plan.shapes import SMOLLM2_SHAPE
from rloo_kit.system.versions import is_importable

# Largest difference from a merged weight, as a share of the largest of its 32 neighbours (q4_k_m: 256): half a step of
# the type. For q4_k_m, whose steps are themselves quantised: twice the error of llama.cpp's code on random weights.
LARGEST_ERROR = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 0.6 / 127, "q4_k_m": 0.2}
KINDS = tuple(LARGEST_ERROR)
TINIEST = 2.0**-24  # of float16
BLOCK, SUPERBLOCK = 32, 256
# transformers' model type, also llama.cpp's architecture: llama.cpp's name for how texts are split before the BPE.
ARCHITECTURES = {"qwen3": "qwen2", "llama": "smollm"}
# llama.cpp refuses a BPE without merges, and a byte-level one may have none. This byte never occurs in UTF-8 text.
NO_MERGE = ["ÿ ÿ"]


def check_gguf(config: Any) -> None:
    """Raise ExportError if GGUF cannot be written: no `gguf` package, or neither a Qwen3 model nor SmolLM2."""
    if not is_importable("gguf"):
        raise ExportError("writing GGUF needs the package gguf, which is not installed: pip install gguf")
    is_smollm2 = config.model_type == "llama" and config.vocab_size == SMOLLM2_SHAPE.vocab_size
    if config.model_type != "qwen3" and not is_smollm2:
        raise ExportError(
            f"the model is a {config.model_type}, and GGUF export supports only qwen3 and SmolLM2: "
            "use rloo-kit export --to merged, then llama.cpp's convert_hf_to_gguf.py"
        )


def write_gguf(
    weights: list[Weight], folder: Path, tokenizer: Any, config: Any, file: Path, kind: str, name: str
) -> None:
    """Write `file`.

    Args:
        weights: of the merged model. folder: with its `config.json` and tokenizer. config: the loaded `config.json`.
        kind: f32, f16, bf16 or q8_0; vectors are in float32. name: of the model, for display.
    """
    import gguf

    arch = config.model_type
    writer = gguf.GGUFWriter(file, arch)
    file_type = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}[kind]
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, tokenizer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    types = [_tensor_type(weight, kind) for weight in weights]
    for weight, tensor_type in zip(weights, types, strict=True):
        target = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ExportError(f"llama.cpp's {arch} has no tensor for {weight.name}")
        size = int(np.prod(gguf.quant_shape_to_byte_shape(weight.shape, tensor_type)))
        writer.add_tensor_info(target, weight.shape, np.dtype(np.float32), size, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for weight, tensor_type in zip(weights, types, strict=True):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        writer.write_tensor_data(gguf.quantize(_interleave(weight, arch, heads), tensor_type))
    writer.close()


def compare_gguf(weights: list[Weight], file: Path, kind: str) -> float:
    """The largest difference between the tensors of `file`, read by gguf's own reader, and the merged weights, as a
    share of the largest neighbour. Raises ExportError if a tensor is missing or differs more than `kind` explains."""
    import gguf

    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    heads = {
        name: int(reader.fields[f"{arch}.attention.{key}"].contents())
        for name, key in (("q_proj", "head_count"), ("k_proj", "head_count_kv"))
    }
    layers = [int(one.name.split(".")[2]) for one in weights if one.name.startswith("model.layers.")]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 1 + max(layers))
    found = {tensor.name: tensor for tensor in reader.tensors}
    largest = 0.0
    for weight in weights:
        tensor = found.pop(str(names.get_name(weight.name, try_suffixes=(".weight", ".bias"))), None)
        if tensor is None:
            raise ExportError(f"{file}: the tensor of {weight.name} is missing, so the export is not published")
        wanted = _interleave(weight, arch, heads)
        error = np.abs(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(wanted.shape) - wanted)
        block = SUPERBLOCK if kind == "q4_k_m" else BLOCK
        width = block if wanted.size % block == 0 else wanted.shape[-1]
        scale = np.abs(wanted).reshape(-1, width).max(axis=-1, keepdims=True)
        excess = np.maximum(error.reshape(-1, width) - TINIEST, 0.0)
        share = float(np.max(excess / np.maximum(scale, TINIEST))) if error.any() else 0.0
        limit = 0.0 if tensor.tensor_type.name == "F32" else LARGEST_ERROR[kind]
        if not share <= limit:  # NaN too
            raise ExportError(
                f"{file}: the tensor {tensor.name} differs by {share:.2g} of its largest neighbour, and {kind} "
                f"explains {limit:.2g}: it is not what was trained, so the export is not published"
            )
        largest = max(largest, share)
    if found:
        raise ExportError(f"{file} has tensors that the model does not have: {', '.join(found)}")
    return largest


def _interleave(weight: Weight, arch: str, heads: dict[str, int]) -> np.ndarray:
    """A weight as llama.cpp stores it: its llama rotates neighbours within a head, transformers' rotates halves."""
    values = weight.read().numpy()
    count = next((number for part, number in heads.items() if f".{part}." in weight.name), None)
    if arch != "llama" or count is None:
        return values
    return np.ascontiguousarray(values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape))


def _tensor_type(weight: Weight, kind: str) -> Any:
    """The type llama.cpp's converter uses: float32 for vectors, float16 if a row is not a whole number of blocks."""
    import gguf

    if len(weight.shape) == 1 or kind == "f32":
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and weight.shape[-1] % BLOCK:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[kind.upper()]


def _add_shape(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)


def _add_tokenizer(writer: Any, folder: Path, tokenizer: Any, config: Any) -> None:
    """A byte-level BPE. Rows without a token are marked unused. Added tokens that are not special, such as the
    thinking tags, are marked user-defined, so that readers keep them in the text."""
    import gguf

    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for index in range(config.vocab_size):
        if index not in by_id:
            kind = gguf.TokenType.UNUSED
        elif index in added:
            kind = gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED
        else:
            kind = gguf.TokenType.NORMAL
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(ARCHITECTURES[config.model_type])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True)
    special.merges = special.merges or NO_MERGE
    special.add_to_gguf(writer, quiet=True)


def quantise(source: Path, file: Path) -> str | None:
    """Quantise the f16 GGUF `source` to `file`, a q4_k_m; without llama-cpp-python return the command that does it."""
    if not is_importable("llama_cpp"):
        return f"llama-quantize {source.name} {file.name} Q4_K_M"
    import ctypes

    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(settings))
    if code or not file.is_file():
        raise ExportError(f"llama.cpp could not quantise {source.name} to {file.name} (code {code})")
    return None

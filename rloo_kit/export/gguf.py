"""Write GGUF, the format of llama.cpp, Ollama and LM Studio: merged weights, tokenizer and chat template in one file.

Tensors are written one by one with the `gguf` package, with the names, types and keys of llama.cpp's converter.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import render_prompt
from rloo_kit.errors import ExportError
from rloo_kit.export.merge import Weight
from rloo_kit.models.policy import Policy
from rloo_kit.plan.shapes import SMOLLM2_SHAPE
from rloo_kit.rollout.completions import find_end_ids

# The types of a file, and llama.cpp's names for files of them.
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BLOCK = 32  # neighbours that share a scale in q8_0
# transformers' model type, also llama.cpp's architecture: llama.cpp's name for how texts are split before the BPE.
ARCHITECTURES = {"qwen3": "qwen2", "llama": "smollm"}
# llama.cpp refuses a BPE without merges, and a byte-level one may have none. This byte never occurs in UTF-8 text.
NO_MERGE = ["ÿ ÿ"]
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_QUESTION = "1+1?"
_TURNS = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
# A prompt in ChatML: its system message, and what follows the user's.
_CHATML = re.compile(r"(?s)(?:<\|im_start\|>system\n(.*)<\|im_end\|>\n)?<\|im_start\|>user\n1\+1\?<\|im_end\|>\n(.*)")


def check_gguf(config: Any) -> None:
    """Raise ExportError if GGUF cannot be written: the model is neither a Qwen3 nor SmolLM2."""
    is_smollm2 = config.model_type == "llama" and config.vocab_size == SMOLLM2_SHAPE.vocab_size
    if config.model_type != "qwen3" and not is_smollm2:
        raise ExportError(
            f"the model is a {config.model_type}, and GGUF export supports only qwen3 and SmolLM2: "
            "use rloo-kit export --to merged, then llama.cpp's convert_hf_to_gguf.py"
        )


def write_gguf(
    weights: list[Weight], folder: Path, tokenizer: Any, config: Any, file: Path, kind: str, name: str
) -> None:
    """Write `file` in `kind` (f32, f16, bf16 or q8_0; vectors are in float32), with the `config.json` and the tokenizer
    of `folder`; `name` is shown."""
    arch = config.model_type
    writer = gguf.GGUFWriter(file, arch)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, tokenizer, config)
    places = _place(weights, config, kind)
    for stored, weight, tensor_type in places:
        size = int(np.prod(gguf.quant_shape_to_byte_shape(weight.shape, tensor_type)))
        writer.add_tensor_info(stored, weight.shape, np.dtype(np.float32), size, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, weight, tensor_type in places:
        writer.write_tensor_data(_encode(weight, config, tensor_type))
    writer.close()


def compare_gguf(weights: list[Weight], file: Path, config: Any, kind: str) -> None:
    """Check that the tensors of `file`, read by gguf's own reader, are the merged weights in the type `kind`, byte for
    byte. Raises ExportError with the first that is not."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, weight, tensor_type in _place(weights, config, kind):
        tensor = found.pop(name, None)
        if tensor is None or tensor.data.tobytes() != _encode(weight, config, tensor_type).tobytes():
            what = "is missing" if tensor is None else f"is not the trained one in {kind}"
            raise ExportError(f"{file}: the tensor {name} {what}, so the export is not published")
    if found:
        raise ExportError(f"{file} has tensors that the model does not have: {', '.join(found)}")


def _place(weights: list[Weight], config: Any, kind: str) -> list[tuple[str, Weight, Any]]:
    """llama.cpp's name of each weight, and the type that its converter uses: float32 for vectors, float16 if a row is
    not a whole number of blocks."""
    arch, placed = config.model_type, []
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for weight in weights:
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ExportError(f"llama.cpp's {arch} has no tensor for {weight.name}")
        wanted = "f32" if len(weight.shape) == 1 else "f16" if kind == "q8_0" and weight.shape[-1] % BLOCK else kind
        placed.append((name, weight, gguf.GGMLQuantizationType[wanted.upper()]))
    return placed


def _encode(weight: Weight, config: Any, tensor_type: Any) -> np.ndarray:
    """A weight as llama.cpp stores it: its llama rotates neighbours within a head, transformers' rotates halves."""
    values, heads = weight.read().numpy(), 0
    if config.model_type == "llama" and ".q_proj." in weight.name:
        heads = config.num_attention_heads
    elif config.model_type == "llama" and ".k_proj." in weight.name:
        heads = config.num_key_value_heads
    if heads:
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return gguf.quantize(np.ascontiguousarray(values), tensor_type)


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
    tokens = [f"[PAD{index}]" for index in range(config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * config.vocab_size
    for token, index in tokenizer.get_vocab().items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for index, token in tokenizer.added_tokens_decoder.items():
        types[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(ARCHITECTURES[config.model_type])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True)
    special.merges = special.merges or NO_MERGE
    special.add_to_gguf(writer, quiet=True)


def write_modelfile(run: RunConfig, policy: Policy, gguf_name: str) -> str | None:
    """The text of `Modelfile` for a GGUF file in the same folder: prompt layout, system prompt (the run's, else the
    template's own), stop tokens and the sampling parameters of `generation_config.json`, which Ollama does not read
    from a GGUF. None if the chat template is not ChatML, the only one that is supported; the family `plain` has none.
    """
    layout, system, thinking = "{{ .Prompt }}", None, run.model.enable_thinking
    if policy.family != "plain":
        prompt = render_prompt(policy.tokenizer, _QUESTION, policy.family, thinking, run.data.system_prompt)
        found = _CHATML.fullmatch(prompt)
        if found is None:
            return None
        system, layout = found[1], _TURNS + found[2]
    own = policy.model.generation_config
    chosen = {name: getattr(own, name, None) for name in SAMPLING if own.do_sample}
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{layout}"""']
    if system:
        lines.append('SYSTEM """' + system.replace('"""', '\\"\\"\\"') + '"""')
    stops = policy.tokenizer.convert_ids_to_tokens(find_end_ids(policy))
    lines += [f'PARAMETER stop "{token}"' for token in stops]
    lines += [f"PARAMETER {name} {value:g}" for name, value in chosen.items() if value is not None]
    lines.append(f"PARAMETER num_ctx {run.model.max_seq_length}")
    return "\n".join(lines) + "\n"

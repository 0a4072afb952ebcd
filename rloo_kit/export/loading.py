"""How to load each export: the snippet of its card, the line that the command prints, and Ollama's `Modelfile`."""

import shlex

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import render_prompt, thinks
from rloo_kit.models.policy import Policy

PLAIN = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its id on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```"""

_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{imports}

folder = "."  # this folder; of one on the hub: huggingface_hub.snapshot_download("OWNER/NAME")
base = AutoModelForCausalLM.from_pretrained({base}, dtype={dtype}{quantization})
model = PeftModel.from_pretrained(base, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""
_FOUR_BIT = (
    ', quantization_config=BitsAndBytesConfig(\n    load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    'bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="{dtype}"\n)'
)

# Qwen3's model cards, for the models that think and for those that do not: temperature, top_p, top_k, min_p.
SAMPLING = {True: (0.6, 0.95, 20, 0.0), False: (0.7, 0.8, 20, 0.0)}
_NAMES = ("temperature", "top_p", "top_k", "min_p")
_USER, _QUESTION = "<|im_start|>user\n", "1+1?"
_TURN = "<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n"


def serve_line(run: RunConfig, policy: Policy, folder: str) -> str:
    """The command that serves a merged folder with vLLM.

    vLLM's parser deepseek_r1 takes everything before `</think>` for thinking, for any tokenizer with both tags, so it
    fits a model that always thinks; qwen3 knows the switch of Qwen3's templates.
    """
    parser, switch = "", run.model.enable_thinking
    if policy.family == "hybrid" and switch is not None:  # as trained; a request may still say otherwise
        parser = f""" --default-chat-template-kwargs '{{"enable_thinking": {str(switch).lower()}}}'"""
    if thinks(policy.family, switch):
        is_qwen3 = policy.model.config.model_type.startswith("qwen3")  # with or without a switch, Qwen3.5 included
        known = "qwen3" if is_qwen3 else "deepseek_r1" if policy.family == "thinking" else None
        parser += f" --reasoning-parser {known}" if known else "  # --reasoning-parser NAME: see vLLM's list of models"
    return f"vllm serve {shlex.quote(folder)} --max-model-len {run.model.max_seq_length}{parser}"


def snippet_adapter(base: str, included: str | None, quantised: bool, dtype: str) -> str:
    """Python that loads an adapter with PEFT.

    Args:
        base: name of the base. included: the folder of the base in the export; None if it is not included.
        quantised: trained on a base quantised to NF4 while loading. dtype: of the base when it was trained.
    """
    where = f'f"{{folder}}/{included}"' if included else f'"{base}"'
    settings = _FOUR_BIT.format(dtype=dtype) if quantised else ""
    text = _ADAPTER.format(
        imports=", BitsAndBytesConfig" if quantised else "",
        base=where,
        dtype='"auto"' if not quantised else f'"{dtype}"',
        quantization=settings,
    )
    note = "The adapter was trained on the base in 4-bit: load the base in 4-bit.\n\n" if quantised else ""
    return note + text


def snippet_vllm(line: str) -> str:
    """The command that serves it, and why it is a merged model."""
    return (
        f"```bash\n{line}\n```\n\nThe adapter is merged: one model, no LoRA kernels in each layer, no separate base. "
        "Several adapters on one base are served from `--to adapter` with `vllm serve BASE --enable-lora "
        "--lora-modules NAME=FOLDER`."
    )


def snippet_gguf(name: str, file: str, has_modelfile: bool) -> str:
    """Commands for llama.cpp and Ollama."""
    name = shlex.quote(name)
    ollama = f"\nollama create {name} -f Modelfile && ollama run {name}" if has_modelfile else ""
    return f"```bash\nllama-server -m {shlex.quote(file)} --jinja{ollama}\n```"


def write_modelfile(run: RunConfig, policy: Policy, gguf_name: str, end_ids: list[int]) -> str | None:
    """The text of `Modelfile` for a GGUF file in the same folder: prompt layout, stop tokens and sampling parameters,
    which Ollama does not read from a GGUF. None if the chat template is not ChatML, the only one that is supported.

    The sampling parameters are the model's own (`generation_config.json`), with Qwen3's as defaults.
    """
    if policy.family == "plain":
        return None
    text = render_prompt(policy.tokenizer, _QUESTION, policy.family, run.model.enable_thinking)
    turn = f"{_USER}{_QUESTION}<|im_end|>\n"
    if not text.startswith(turn):
        return None
    opening = text.removeprefix(turn)  # the end of a prompt, from the assistant's turn on
    own = policy.model.generation_config
    defaults = SAMPLING[thinks(policy.family, run.model.enable_thinking)]
    chosen = [getattr(own, name, None) if own.do_sample else None for name in _NAMES]
    values = [value if given is None else given for given, value in zip(chosen, defaults, strict=True)]
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{{{{- range .Messages }}}}{_TURN}{{{{ end }}}}{opening}"""']
    if run.data.system_prompt:
        lines.append('SYSTEM """' + run.data.system_prompt.replace('"""', '\\"\\"\\"') + '"""')
    stops = policy.tokenizer.convert_ids_to_tokens(end_ids)
    lines += [f'PARAMETER stop "{token}"' for token in stops]
    lines += [f"PARAMETER {name} {value:g}" for name, value in zip(_NAMES, values, strict=True)]
    lines.append(f"PARAMETER num_ctx {run.model.max_seq_length}")
    return "\n".join(lines) + "\n"

"""`Modelfile`: the prompt layout, stop tokens and sampling parameters, which Ollama does not read from a GGUF."""

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import render_prompt, thinks
from rloo_kit.models.policy import Policy

# Qwen3's model cards, for the models that think and for those that do not: temperature, top_p, top_k, min_p.
SAMPLING = {True: (0.6, 0.95, 20, 0.0), False: (0.7, 0.8, 20, 0.0)}
_NAMES = ("temperature", "top_p", "top_k", "min_p")
_USER, _QUESTION = "<|im_start|>user\n", "1+1?"
_TURN = "<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n"


def opening_of(run: RunConfig, policy: Policy) -> str | None:
    """The end of a prompt, from the assistant's turn on; None if the chat template is not ChatML, the only one that
    `write_modelfile` supports."""
    if policy.family == "plain":
        return None
    text = render_prompt(policy.tokenizer, _QUESTION, policy.family, run.model.enable_thinking)
    turn = f"{_USER}{_QUESTION}<|im_end|>\n"
    return text.removeprefix(turn) if text.startswith(turn) else None


def write_modelfile(run: RunConfig, policy: Policy, gguf_name: str, end_ids: list[int]) -> str | None:
    """The text of the Modelfile for a GGUF file in the same folder; None if the chat template is not ChatML.

    The sampling parameters are the model's own (`generation_config.json`), with Qwen3's as defaults.
    """
    opening = opening_of(run, policy)
    if opening is None:
        return None
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

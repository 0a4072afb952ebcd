"""Which models think, read from the prompts that their templates render.

The templates are short forms with the behaviour of the published ones (named in docs/data.md); tests/real_tokenizer has
a real tokenizer.
"""

import copy
from typing import Any

import pytest

from rloo_kit.config.run import RunConfig
from rloo_kit.data.chat import check_budget, render_prompt, resolve_family, thinks
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.think_tags import opens_thinking

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
START, EMPTY = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
OFF = "{% if enable_thinking is defined and enable_thinking is false %}"
SWITCH = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% set mode = '/think' if enable_thinking else '/no_think' %}"
    "{% if messages[0].role == 'system' %}{% if '/no_think' in messages[0].content %}{% set mode = '/no_think' %}"
    "{% elif '/think' in messages[0].content %}{% set mode = '/think' %}{% endif %}{% endif %}"
)
LATER = "{% for m in messages if m.role != 'system' %}"
TEMPLATES = {
    "Qwen/Qwen3.5-4B": f"{TURNS}{START}{OFF}{EMPTY}{{% else %}}<think>\n{{% endif %}}",
    "Qwen/Qwen3.5-0.8B": (
        f"{TURNS}{START}{{% if enable_thinking is defined and enable_thinking is true %}}<think>\n"
        f"{{% else %}}{EMPTY}{{% endif %}}"
    ),
    "Qwen/Qwen3-0.6B": f"{TURNS}{START}{OFF}{EMPTY}{{% endif %}}",
    "Qwen/Qwen3-4B-Instruct-2507": TURNS + START,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": f"{TURNS}{START}<think>\n",
    "an older/DeepSeek-R1-Distill-Qwen-7B": TURNS + START,
    "HuggingFaceTB/SmolLM3-3B": f"{SWITCH}{TURNS}{START}{{% if mode == '/no_think' %}}{EMPTY}{{% endif %}}",
    "microsoft/Phi-4-reasoning": f"<|im_start|>system\nWrite <think> thoughts </think> first<|im_end|>\n{TURNS}{START}",
    "deepseek-ai/DeepSeek-V3.1": f"{TURNS}{START}{{% if thinking %}}<think>{{% else %}}</think>{{% endif %}}",
    "ibm-granite/granite-3.3-2b": f"{{% if thinking %}}Use <think></think>.\n{{% endif %}}{TURNS}{START}",
    "openai/gpt-oss-20b": f"Reasoning: {{{{ reasoning_effort or 'medium' }}}}\n{TURNS}{START}",
    "nvidia/Nemotron-Nano-9B-v2": (
        f"{TURNS}{START}{{% if '/no_think' in messages[0].content %}}<think></think>{{% else %}}<think>\n{{% endif %}}"
    ),
    "a hybrid/Thinking": f"{TURNS}{START}{OFF}{EMPTY}{{% endif %}}",
    "an opening/Instruct": f"{TURNS}{START}<think>\n",
    "a/Model-Thinking": TURNS + START,
}
# (family, whether the prompt opens the thinking); all think but the instruct ones.
FOUND = {
    "Qwen/Qwen3.5-4B": ("hybrid", True),
    "Qwen/Qwen3-0.6B": ("hybrid", False),
    "Qwen/Qwen3-4B-Instruct-2507": ("instruct", False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": ("thinking", True),
    "an older/DeepSeek-R1-Distill-Qwen-7B": ("thinking", False),
    "HuggingFaceTB/SmolLM3-3B": ("hybrid", False),
    "microsoft/Phi-4-reasoning": ("thinking", False),
    "deepseek-ai/DeepSeek-V3.1": ("instruct", False),
    "ibm-granite/granite-3.3-2b": ("instruct", False),
    "openai/gpt-oss-20b": ("instruct", False),
    "nvidia/Nemotron-Nano-9B-v2": ("thinking", True),
    "a hybrid/Thinking": ("hybrid", False),
    "an opening/Instruct": ("thinking", True),
    "a/Model-Thinking": ("thinking", False),
}


@pytest.fixture
def of(tiny_tokenizer: Any) -> Any:
    """`of(name)`: a tokenizer with that model's template."""

    def build(name: str) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = TEMPLATES[name] + "{{ '' }}"  # Jinja drops a line break at the end
        return tokenizer

    return build


@pytest.mark.parametrize("name", FOUND)
def test_the_rendered_prompt_decides(of: Any, name: str) -> None:
    """An R1 distillation with an older template, and Phi-4-reasoning, were taken for models that never think: their
    thoughts were judged as answers."""
    family, opened = FOUND[name]
    assert resolve_family(of(name), name) == family and thinks(family) == (family != "instruct")
    assert opens_thinking(render_prompt(of(name), "1+1?", family)) is opened


def test_a_system_message_that_the_template_leaves_out(of: Any) -> None:
    """Phi-4-reasoning has a system prompt of its own, and `data.system_prompt` ("give the answer in a box") vanished:
    every answer was judged as one without a box. A template may trim a message, or take a switch out of it."""
    tokenizer = of("microsoft/Phi-4-reasoning")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% for m in messages %}", LATER)
    with pytest.raises(DataError, match=r"leaves the system message out.*data.system_prompt: null"):
        render_prompt(tokenizer, "1+1?", "thinking", system_prompt="Use a box.")
    assert "1+1?" in render_prompt(tokenizer, "1+1?", "thinking")
    smollm3 = of("HuggingFaceTB/SmolLM3-3B")
    smollm3.chat_template = smollm3.chat_template.replace("{{ m.content }}", "{{ m.content.replace('/think', '') }}")
    assert "Be  brief." in render_prompt(smollm3, "1+1?", "hybrid", None, "Be  brief. /think\n")


def test_thinking_that_is_off_by_default_needs_the_key(of: Any) -> None:
    """Qwen3.5-0.8B and 2B: the prompt closes the thinking, and budgets closed the answer once more."""
    name = "Qwen/Qwen3.5-0.8B"
    for family in ("auto", "hybrid"):
        with pytest.raises(ConfigError) as caught:
            resolve_family(of(name), name, family)
        for part in ("model.enable_thinking is not set", name, r"</think>\n\n", "model.enable_thinking: true", "false"):
            assert part in str(caught.value)
    for switch in (True, False):
        family = resolve_family(of(name), name, "auto", switch)
        assert family == "hybrid" and thinks(family, switch) is switch
        assert opens_thinking(render_prompt(of(name), "1+1?", family, switch)) is switch
    run = RunConfig.model_validate(
        {
            "model": {"name": name, "enable_thinking": False},
            "data": {"source": "x.jsonl"},
            "rewards": [{"name": "length_reward"}],
            "rloo": {"max_steps": 1, "thinking_budget": 100},
        }
    )
    with pytest.raises(ConfigError, match="set rloo.thinking_budget=null"):
        check_budget(run, "hybrid")
    with pytest.raises(DataError, match="model.enable_thinking: false"):  # a caller that skips resolve_family
        render_prompt(of(name), "1+1?", "hybrid")


def test_another_switch_is_no_enable_thinking(of: Any) -> None:
    """DeepSeek-V3.1 and Granite take `thinking`, which the kit leaves at their default: off."""
    for name in ("deepseek-ai/DeepSeek-V3.1", "ibm-granite/granite-3.3-2b", "openai/gpt-oss-20b"):
        with pytest.raises(ConfigError, match=r"model.enable_thinking is true.* does not read enable_thinking. Remove"):
            resolve_family(of(name), name, "auto", True)
    with pytest.raises(ConfigError, match="model.family is 'thinking'.*Set model.family: instruct"):
        resolve_family(of("deepseek-ai/DeepSeek-V3.1"), "deepseek-ai/DeepSeek-V3.1", "thinking")
    # Where the template is silent, the user's word counts before the name.
    assert resolve_family(of("ibm-granite/granite-3.3-2b"), "granite", "thinking") == "thinking"
    assert resolve_family(of("ibm-granite/granite-3.3-2b"), "a/Model-Thinking", "instruct") == "instruct"


@pytest.mark.parametrize(
    ("name", "family", "switch", "mode", "fix"),
    [
        ("HuggingFaceTB/SmolLM3-3B", "hybrid", None, "/no_think", "set model.enable_thinking: false"),
        ("HuggingFaceTB/SmolLM3-3B", "hybrid", True, "/no_think", "set model.enable_thinking: false"),
        ("HuggingFaceTB/SmolLM3-3B", "hybrid", False, "/think", "set model.enable_thinking: true"),
        ("nvidia/Nemotron-Nano-9B-v2", "thinking", None, "/no_think", "remove it$"),
    ],
)
def test_a_system_prompt_does_not_switch_the_thinking(
    of: Any, name: str, family: str, switch: bool | None, mode: str, fix: str
) -> None:
    """SmolLM3 reads /no_think in a row's system message, and the thinking budget closed that row's answer."""
    with pytest.raises(DataError, match=f"the rendered prompt ends in .*{mode}.*{fix}"):
        render_prompt(of(name), "1+1?", family, switch, system_prompt=f"Be brief. {mode}")
    assert "Be brief." in render_prompt(of(name), "1+1?", family, switch, system_prompt="Be brief.")
    if family == "hybrid":  # said twice is no contradiction
        both = render_prompt(of(name), "1+1?", family, mode == "/think", system_prompt=f"Be brief. {mode}")
        assert "Be brief." in both

"""The chat template: applied once, for the family that the tokenizer's own template shows."""

import copy
import time
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rloo_kit.data.chat import check_budget, parse_conversation, render_prompt, resolve_family, thinks
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.think_tags import opens_thinking

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n"
TEMPLATES = {
    "thinking": TURNS + OPENING + "<think>\n{% endif %}",
    "instruct": TURNS + OPENING + "{% endif %}",
    # As the first Qwen3 models have it: only an explicit false closes the thinking beforehand.
    "hybrid": TURNS
    + OPENING
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "plain": None,
}


@pytest.fixture
def with_template(tiny_tokenizer: Any) -> Any:
    """`with_template(family)` gives a tokenizer with that family's template (or the template itself)."""

    def build(family: str) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = TEMPLATES.get(family, family)
        return tokenizer

    return build


@pytest.fixture(scope="module")
def bos_tokenizer() -> Any:
    """A tokenizer that puts `<s>` in front of every text, with a template that writes it too (Llama, Gemma)."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    return tokenizer


@pytest.mark.parametrize(
    ("family", "template", "text"),
    [
        ("instruct", "thinking", "opens <think> in the prompt"),
        ("thinking", "hybrid", "takes enable_thinking"),
        ("hybrid", "instruct", "neither opens <think> nor takes enable_thinking"),
        ("thinking", "plain", "has no chat template"),
    ],
)
def test_contradiction_is_an_error(with_template, family, template, text):
    """`family: instruct` on a Thinking checkpoint trained for hours on prompts that ended with an open `<think>`."""
    with pytest.raises(ConfigError) as caught:
        resolve_family(with_template(template), "my-model", family)
    message = str(caught.value)
    assert f"model.family is '{family}'" in message and text in message
    assert f"Set model.family: {template} or auto" in message


@pytest.mark.parametrize(("template", "value"), [("instruct", True), ("thinking", False), ("plain", True)])
def test_enable_thinking_needs_a_hybrid_model(with_template, template, value):
    """`enable_thinking: false` on a Thinking-2507 model does nothing; the run kept thinking."""
    with pytest.raises(ConfigError, match=r"model.enable_thinking is (true|false), but .* cannot be switched"):
        resolve_family(with_template(template), "m", "auto", value)
    assert resolve_family(with_template("hybrid"), "m", "auto", value) == "hybrid"


def test_rendering_of_each_family(with_template):
    """The text is the template's own, generation prompt and all: a missing newline is another prompt to the model."""
    user = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert render_prompt(with_template("thinking"), "1+1?", "thinking") == user + "<think>\n"
    assert render_prompt(with_template("instruct"), "1+1?", "instruct") == user
    hybrid = with_template("hybrid")
    assert render_prompt(hybrid, "1+1?", "hybrid") == render_prompt(hybrid, "1+1?", "hybrid", True) == user
    assert render_prompt(hybrid, "1+1?", "hybrid", False) == user + "<think>\n\n</think>\n\n"


def test_system_prompt_goes_where_none_is(with_template):
    """Rows with a system message keep it; two in a row confuse most models."""
    tokenizer = with_template("instruct")
    given = render_prompt(tokenizer, "hi", "instruct", system_prompt="Be brief.")
    assert given.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    own = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "hi"}]
    assert "Be brief." not in render_prompt(tokenizer, own, "instruct", system_prompt="Be brief.")
    with pytest.raises(ConfigError, match="data.system_prompt is set, but model.family is 'plain'"):
        render_prompt(tokenizer, "hi", "plain", system_prompt="Be brief.")


def test_conversation_with_columns_that_arrow_filled(with_template):
    """Arrow gives every message all keys that any message has: a `name: None` must not reach the template."""
    tokenizer = with_template("{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}")
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "x"}]
    assert render_prompt(tokenizer, messages, "instruct") == "role,content;role,content,name;"


def test_text_like_a_conversation_is_read_at_once(with_template):
    """A conversation, 60,000 spaces and a letter took 11.5 s; one that is no value of Python was a traceback."""
    talk = "[{'role': 'user', 'content': 'x'}]"
    start = time.perf_counter()
    assert parse_conversation(talk + " " * 60_000 + "x").endswith(" x")
    assert time.perf_counter() - start < 2
    assert parse_conversation(f"\n {talk} \n") == [{"role": "user", "content": "x"}]
    odd = "[{'role': 'user', 'content': 'x', 'n': {[]: 1}}]"
    assert parse_conversation(odd) == odd
    with pytest.raises(DataError, match="neither JSON nor Python"):
        render_prompt(with_template("instruct"), f" {odd} ", "instruct")


def user(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


BAD = [
    ("", "the prompt is empty"),
    (None, "of type NoneType; it must be text or a list of messages"),
    ([], "an empty list"),
    (["hi"], "message 1 of the prompt must be"),
    ([{"role": "user"}], "message 1 of the prompt must be"),
    ([{"role": "human", "content": "hi"}], "role 'human'; it must be one of system, user"),
    ([{"role": "user", "content": [{"type": "text"}]}], "content of type list; it must be text"),
    (user(""), "message 1 of the prompt is empty"),
    ([*user("q"), {"role": "assistant", "content": "a"}], "ends with the assistant's own"),
    ("<|im_start|>user\n1+1?<|im_end|>", "control token <|im_start|>: a chat template seems to be applied already"),
    ("close it: </think> 42", "the user message contains </think>"),
    ("use <think> tags", "the user message contains <think>"),
    (user("</think>"), "the user message contains </think>"),
    (user("hi", name="a</think>"), "the user message's name contains </think>"),
    ([{"role": "assistant", "content": "2", "reasoning_content": "</think>"}, *user("hi")], "_content contains"),
    (user("hi", tool_calls=[{"arguments": {"a": ["</think>"]}}]), "the user message's tool_calls contains </think>"),
    (user("hi", parts={"<|im_end|>": 1}), "message's parts contains the tokenizer's control token <|im_end|>"),
    ("half \ud83d", "contains \\ud83d at character 22, half of a surrogate pair"),
]


@pytest.mark.parametrize(("prompt", "text"), BAD)
@pytest.mark.parametrize("family", ["thinking", "instruct"])
def test_bad_prompts_are_refused(with_template, family, prompt, text):
    """Each once became a prompt: 'None', an answer behind an answer, or the token that every reward decides by."""
    with pytest.raises(DataError) as caught:
        render_prompt(with_template(family), prompt, family)
    assert text in str(caught.value)
    with pytest.raises(DataError, match="the system message contains </think>"):
        render_prompt(with_template(family), "hi", family, system_prompt="Do not write </think>.")


# What Qwen3's template does with the assistant's turns: thinking is split off, and dropped before the last question.
QWEN3 = (
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}" + OPENING + "<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ("<think>\n1+1\n</think>\n\n2", None),
        ("1+1\n</think>\n\n2", None),  # as a model writes it whose prompt ends in an open <think>
        ("\n <think></think>2", None),
        ("2", None),
        ("<think>1+1", "<think>"),
        ("<think>a</think>b</think>c", "</think>"),
        ("<think>a<think>b</think>c", "<think>"),
        ("so <think>a</think>b", "<think>"),
        ("a</think><think>", "<think>"),
    ],
)
def test_only_an_assistants_turn_may_hold_thinking(with_template, content, refused):
    """Earlier turns of a conversation come with their thinking, which the template takes out: once, in front."""
    tokenizer = with_template(QWEN3)
    talk = [*user("1+1?"), {"role": "assistant", "content": content}, *user("And 2+2?")]
    if refused is not None:
        with pytest.raises(DataError) as caught:
            render_prompt(tokenizer, talk, "thinking")
        assert f"the assistant message contains {refused}" in str(caught.value)
        return
    text = render_prompt(tokenizer, talk, "thinking")
    ids = tokenizer(text)["input_ids"]
    assert text.endswith("<think>\n") and "2<|im_end|>" in text
    assert (ids.count(259), ids.count(260)) == (1, 0), "the open tag of the generation prompt, and no other"


def test_tags_that_are_no_tokens_are_text(with_template, bos_tokenizer):
    """A tokenizer without thinking tags reads them as any other text; and a rendered prompt has its own."""
    assert "</think>" in render_prompt(bos_tokenizer, "close it: </think>", "instruct")
    assert render_prompt(with_template("plain"), "<|im_start|>user\n</think>", "plain").endswith("</think>")


def test_template_that_fails_is_named(with_template):
    """Some templates refuse a system message; the bare Jinja error named neither the template nor the roles."""
    tokenizer = with_template("{{ raise_exception('no system role') if messages[0].role == 'system' else '' }}x")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with pytest.raises(DataError, match=r"cannot render roles \['system', 'user'\].*no system role"):
        render_prompt(tokenizer, messages, "instruct")


def test_one_bos_where_template_and_tokenizer_both_write_it(bos_tokenizer):
    """With the template's own BOS left in, every prompt of a Llama began with two."""
    text = render_prompt(bos_tokenizer, "hi", "instruct")
    wanted = bos_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert bos_tokenizer(text)["input_ids"] == wanted["input_ids"]
    assert wanted["input_ids"].count(bos_tokenizer.bos_token_id) == 1
    ids = bos_tokenizer(render_prompt(bos_tokenizer, "<s>Once", "plain"))["input_ids"]
    assert ids == bos_tokenizer("Once")["input_ids"], "plain text often comes with the BOS typed in front of it"
    tokenizer = copy.deepcopy(bos_tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    assert tokenizer("x")["input_ids"][0] != tokenizer.bos_token_id
    text = render_prompt(tokenizer, "hi", "instruct")
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 1, "taking it away would leave none"


def test_plain_takes_text_and_is_always_allowed(with_template):
    """Base models' tokenizers come with a template that the model has never seen; a conversation needs one."""
    tokenizer = with_template("hybrid")
    assert resolve_family(tokenizer, "base", "plain") == "plain"
    assert render_prompt(tokenizer, "Once upon", "plain") == "Once upon"
    with pytest.raises(DataError, match="the prompt is a list, but model.family is 'plain', which applies no chat tem"):
        render_prompt(tokenizer, [{"role": "user", "content": "a"}], "plain")
    with pytest.raises(ConfigError, match="model.family is 'chatty'; it must be auto or one of thinking, hybrid, in"):
        resolve_family(tokenizer, "m", "chatty")


# which models think, read from the prompts that their templates render

START, EMPTY = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
OFF = "{% if enable_thinking is defined and enable_thinking is false %}"
SWITCH = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% set mode = '/think' if enable_thinking else '/no_think' %}"
    "{% if messages[0].role == 'system' %}{% if '/no_think' in messages[0].content %}{% set mode = '/no_think' %}"
    "{% elif '/think' in messages[0].content %}{% set mode = '/think' %}{% endif %}{% endif %}"
)
LATER = "{% for m in messages if m.role != 'system' %}"
# Short forms of the published templates, which docs/data.md names; their family, and whether the prompt
# opens the thinking. All think but the instruct ones; Qwen3.5-0.8B needs model.enable_thinking.
PUBLISHED: dict[str, tuple[str, str, bool]] = {
    "Qwen/Qwen3.5-4B": (f"{TURNS}{START}{OFF}{EMPTY}{{% else %}}<think>\n{{% endif %}}", "hybrid", True),
    "Qwen/Qwen3.5-0.8B": (
        f"{TURNS}{START}{{% if enable_thinking is defined and enable_thinking is true %}}<think>\n"
        f"{{% else %}}{EMPTY}{{% endif %}}", "", False),
    "Qwen/Qwen3-0.6B": (f"{TURNS}{START}{OFF}{EMPTY}{{% endif %}}", "hybrid", False),
    "Qwen/Qwen3-4B-Instruct-2507": (TURNS + START, "instruct", False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (f"{TURNS}{START}<think>\n", "thinking", True),
    "an older/DeepSeek-R1-Distill-Qwen-7B": (TURNS + START, "thinking", False),
    "HuggingFaceTB/SmolLM3-3B": (
        f"{SWITCH}{TURNS}{START}{{% if mode == '/no_think' %}}{EMPTY}{{% endif %}}", "hybrid", False),
    "microsoft/Phi-4-reasoning": (
        f"<|im_start|>system\nWrite <think> thoughts </think> first<|im_end|>\n{TURNS}{START}", "thinking", False),
    "deepseek-ai/DeepSeek-V3.1": (
        f"{TURNS}{START}{{% if thinking %}}<think>{{% else %}}</think>{{% endif %}}", "instruct", False),
    "ibm-granite/granite-3.3-2b": (
        f"{{% if thinking %}}Use <think></think>.\n{{% endif %}}{TURNS}{START}", "instruct", False),
    "openai/gpt-oss-20b": (f"Reasoning: {{{{ reasoning_effort or 'medium' }}}}\n{TURNS}{START}", "instruct", False),
    "nvidia/Nemotron-Nano-9B-v2": (
        f"{TURNS}{START}{{% if '/no_think' in messages[0].content %}}<think></think>{{% else %}}<think>\n{{% endif %}}",
        "thinking", True),
    "an opening/Instruct": (f"{TURNS}{START}<think>\n", "thinking", True),
    "a/Model-Thinking": (TURNS + START, "thinking", False),
}  # fmt: skip


@pytest.fixture
def of(with_template: Any) -> Any:
    """`of(name)`: a tokenizer with that published model's template."""
    return lambda name: with_template(PUBLISHED[name][0] + "{{ '' }}")  # Jinja drops a line break at the end


@pytest.mark.parametrize("name", [name for name, (_, family, _) in PUBLISHED.items() if family])
def test_the_rendered_prompt_decides(of: Any, name: str) -> None:
    """An older R1 distillation and Phi-4-reasoning were taken for models that never think."""
    _, family, opened = PUBLISHED[name]
    assert resolve_family(of(name), name) == family and thinks(family) == (family != "instruct")
    assert opens_thinking(render_prompt(of(name), "1+1?", family)) is opened


def test_a_system_message_that_the_template_leaves_out(of: Any) -> None:
    """Phi-4-reasoning has a system prompt of its own, and `data.system_prompt` vanished without a word."""
    tokenizer = of("microsoft/Phi-4-reasoning")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% for m in messages %}", LATER)
    with pytest.raises(DataError, match=r"leaves the system message out.*data.system_prompt: null"):
        render_prompt(tokenizer, "1+1?", "thinking", system_prompt="Use a box.")
    assert "1+1?" in render_prompt(tokenizer, "1+1?", "thinking")
    smollm3 = of("HuggingFaceTB/SmolLM3-3B")
    smollm3.chat_template = smollm3.chat_template.replace("{{ m.content }}", "{{ m.content.replace('/think', '') }}")
    assert "Be  brief." in render_prompt(smollm3, "1+1?", "hybrid", None, "Be  brief. /think\n")


def test_thinking_that_is_off_by_default_needs_the_key(of: Any, make_run: Any) -> None:
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
    run = make_run()
    run.model.enable_thinking, run.rloo.thinking_budget = False, 100
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

"""The tokenizer without transformers equals the one with it: what is checked before the stack holds after it."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rloo_kit.data.chat import detect_family, render_prompt
from rloo_kit.data.light_tokenizer import embedded_tokenizer, read_tokenizer
from rloo_kit.demo.embedded import build_tokenizer

TEXTS = ["12+34=", "", "ü ∑ 🙂", "a\u0301", "<think>\n7+5=12</think>\n\n46<|im_end|>", "  two  spaces\r\n", "\x00\x7f"]
# Uses a filter, a global and loop controls of the environment that transformers compiles templates in.
QWEN_LIKE = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}\n"
    "{{ '<|im_start|>' ~ m.role }} {{ m | tojson }}\n"
    "{% endfor %}{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}A{% endif %}"
)


@pytest.mark.parametrize(
    ("kind", "vocabulary"), [("thinking", "qwen3"), ("instruct", "compact"), ("untaught", "compact")]
)
def test_the_embedded_tokenizer_is_the_same_one(kind: str, vocabulary: str) -> None:
    """A row that fits before the stack and not after it would be found behind the model again."""
    light, heavy = embedded_tokenizer(kind, vocabulary), build_tokenizer(kind, vocabulary)
    assert light.get_vocab() == heavy.get_vocab()
    assert light(TEXTS)["input_ids"] == heavy(TEXTS)["input_ids"]
    for text in TEXTS:
        ids = heavy(text)["input_ids"]
        assert light(text)["input_ids"] == ids == light(text, add_special_tokens=False)["input_ids"]
        for skip in (False, True):
            assert light.decode(ids, skip_special_tokens=skip) == heavy.decode(ids, skip_special_tokens=skip)
    assert (light.eos_token_id, light.bos_token_id) == (heavy.eos_token_id, heavy.bos_token_id)
    family = detect_family(heavy)
    assert detect_family(light) == family == ("thinking" if kind == "untaught" else kind)
    assert render_prompt(light, "12+34=", family) == render_prompt(heavy, "12+34=", family)


@pytest.mark.parametrize("template", [None, QWEN_LIKE])
def test_a_folder_gives_the_same_prompts(tmp_path: Path, template: str | None) -> None:
    """A template rendered in another way would refuse, or accept, other rows than the run does."""
    heavy = build_tokenizer("thinking", "compact")
    heavy.chat_template = template or heavy.chat_template
    heavy.save_pretrained(tmp_path)
    heavy, light = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    assert light is not None and light.get_vocab() == heavy.get_vocab()
    talk = [{"role": "system", "content": "Ü"}, {"role": "tool", "content": "x"}, {"role": "user", "content": "1+1="}]
    for options in ({}, {"enable_thinking": False}):
        wanted = heavy.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **options)
        assert light.apply_chat_template(talk, add_generation_prompt=True, **options) == wanted
        assert light(wanted)["input_ids"] == heavy(wanted)["input_ids"]
    marks = {token: added.special for token, added in light.added_tokens_decoder.items()}
    assert marks == {token: added.special for token, added in heavy.added_tokens_decoder.items()}


def test_what_only_transformers_can_load_is_left_to_it(tmp_path: Path) -> None:
    """A template with a tag of transformers' own would be called broken before the run, which renders it."""
    assert read_tokenizer(tmp_path) is None
    heavy = build_tokenizer("thinking", "compact")
    heavy.chat_template = "{% generation %}x{% endgeneration %}"
    heavy.save_pretrained(tmp_path)
    assert read_tokenizer(tmp_path) is None

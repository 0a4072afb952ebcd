"""What the skill's pages say to Unsloth exists in the pinned version."""

from typing import Any

from tests.skill.calls import find_faults, find_missing_names, read_calls
from tests.skill.pages import find_blocks, read_pages


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

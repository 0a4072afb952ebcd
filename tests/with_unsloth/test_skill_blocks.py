"""What the skill's pages say to Unsloth exists in the pinned version."""

from typing import Any

from tests.skill.calls import check_names
from tests.skill.pages import find_blocks, read_pages


def test_the_calls_of_the_pages_are_taken(unsloth: Any) -> None:
    """Published recipes import names that Unsloth has renamed since (`is_bf16_supported`)."""
    checked: set[str] = set()
    for name, text in read_pages():
        faults, found = check_names(find_blocks(name, text, "python"), ("unsloth",))
        assert faults == []
        checked |= found
    assert {"FastLanguageModel.from_pretrained", "FastLanguageModel.get_peft_model"} <= checked

"""The sections of the trainings that come before RLOO, on demonstrations and on preferences."""

from typing import ClassVar

from pydantic import Field, model_validator

from rloo_kit.config.schema import Count, LoraSection, Named
from rloo_kit.config.section import Section, key

LORA_SFT_RATE, FULL_SFT_RATE = 2e-4, 2e-5  # common for models of billions of parameters; much smaller ones need more


class SftSection(Section):
    """Demonstrations to train on before RLOO: where they come from, and for how long."""

    prefix: ClassVar[str] = "sft."
    source: Named | None = key(None, "source of the demonstrations; null: data.source")
    subset: str | None = key(None, "hub only; null: data.subset, or none if sft.source is set")
    split: str | None = key(None, "null: data.split, or train if sft.source is set")
    prompt_column: str | None = key(None, "null: data.prompt_column", min_length=1)
    completion_column: str = key(
        "completion", "column with the demonstration, without the thinking if thinking_column is set",
        min_length=1,
    )  # fmt: skip
    thinking_column: str | None = key(
        None, "column with the thinking; null: in the demonstration, closed by </think>", min_length=1
    )
    num_prompts: Count | None = key(None, "demonstrations to draw; null: all")
    max_steps: Count | None = key(None, "optimizer steps; wins over num_train_epochs")
    num_train_epochs: float = key(1.0, "passes over the demonstrations, when max_steps is null", gt=0)
    learning_rate: float = key(
        LORA_SFT_RATE, "peak learning rate; decays linearly to 0", gt=0,
        follows=f"{FULL_SFT_RATE:g} with model.lora: null",
    )  # fmt: skip
    per_device_train_batch_size: Count = key(4, "demonstrations of one micro-step")
    gradient_accumulation_steps: Count = key(4, "micro-steps of one optimizer step")

    @model_validator(mode="after")
    def _check_columns(self) -> "SftSection":
        if self.thinking_column == self.completion_column:
            raise ValueError(
                f"thinking_column and completion_column are both {self.completion_column!r}; name two columns, or set "
                "sft.thinking_column=null if one column has both"
            )
        return self


class RewardModelSection(Section):
    """Preferences that a reward model is trained on: where they come from, and for how long."""

    prefix: ClassVar[str] = "reward_model."
    source: Named = Field(description="source of the pairs, as data.source")
    subset: str | None = key(None, "hub only")
    split: str = key("train", "the split to read (hub, save_to_disk)")
    prompt_column: str | None = key(
        None, "null: data.prompt_column; the same as chosen_column if both columns have whole conversations",
        min_length=1,
    )  # fmt: skip
    chosen_column: str = key("chosen", "column with the better answer, text or messages", min_length=1)
    rejected_column: str = key("rejected", "column with the worse one", min_length=1)
    model: Named | None = key(None, "the model to start from; null: model.name")
    num_pairs: Count | None = key(None, "pairs to draw, held-out ones included; null: all")
    test_size: int | float = key(0.1, "prompts whose pairs are held out: a count, or a share below 1", gt=0)
    max_steps: Count | None = key(None, "optimizer steps; wins over num_train_epochs")
    num_train_epochs: float = key(1.0, "passes over the pairs, when max_steps is null", gt=0)
    learning_rate: float | None = key(None, "peak learning rate, decays linearly; null: 1e-4, 1e-5 without lora", gt=0)
    per_device_train_batch_size: Count = key(8, "pairs of one micro-step")
    gradient_accumulation_steps: Count = key(1, "micro-steps of one optimizer step")
    lora: LoraSection | None = Field(
        default_factory=LoraSection, description="adapter, merged afterwards; null trains every parameter"
    )

"""The section `sft:` of a run's configuration: the supervised training that `rloo-kit sft` does before RLOO."""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from rloo_kit.config.section import Section, key

LORA_SFT_RATE, FULL_SFT_RATE = 2e-4, 2e-5  # common for models of billions of parameters; much smaller ones need more
Count = Annotated[int, Field(ge=1, lt=2**31)]


class SftSection(Section):
    """Demonstrations to train on before RLOO: where they come from, and for how long."""

    prefix: ClassVar[str] = "sft."

    source: str | None = key(
        None, "source of the demonstrations, same forms as data.source; null: data.source", min_length=1
    )
    subset: str | None = key(
        None, "hub sources only: its configuration; null: data.subset, or none if sft.source is set"
    )
    split: str | None = key(None, "the split to read; null: data.split, or train if sft.source is set")
    prompt_column: str | None = key(None, "null: data.prompt_column", min_length=1)
    completion_column: str = key(
        "completion", "column with the demonstration: all that the model should write, or what follows the thinking "
        "if thinking_column is set",
        min_length=1,
    )  # fmt: skip
    thinking_column: str | None = key(
        None, "column with the thinking; null: the demonstration includes it, closed by </think>", min_length=1
    )
    num_prompts: Count | None = key(None, "demonstrations to draw; null for all")
    max_length: Count | None = key(
        None, "leave out rows with more tokens of prompt and demonstration; null: model.max_seq_length"
    )
    max_steps: Count | None = key(None, "optimizer steps; wins over num_train_epochs")
    num_train_epochs: float = key(1.0, "passes over the demonstrations, when max_steps is null", gt=0)
    learning_rate: float = key(
        LORA_SFT_RATE, "peak learning rate; decays linearly to 0", gt=0,
        follows=f"{FULL_SFT_RATE:g} with model.lora: null",
    )  # fmt: skip
    warmup_steps: float = key(0.05, "optimizer steps of warm-up; below 1, a share of the run", ge=0)
    per_device_train_batch_size: Count = key(4, "demonstrations of one micro-step")
    gradient_accumulation_steps: Count = key(4, "micro-steps of one optimizer step")
    signal_prompts: int = key(
        64, "training prompts to sample rloo.num_generations completions for afterwards, to check that RLOO has a "
        "signal; 0: none",
        ge=0,
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_columns(self) -> "SftSection":
        if self.thinking_column == self.completion_column:
            raise ValueError(
                f"thinking_column and completion_column are both {self.completion_column!r}; name two columns, or set "
                "sft.thinking_column=null if one column has both"
            )
        return self

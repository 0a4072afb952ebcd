"""The section `sft:` of a run's configuration: the supervised training that `rloo-kit sft` does before RLOO."""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from rloo_kit.config.section import Section, key

LORA_SFT_RATE, FULL_SFT_RATE = 2e-4, 2e-5  # common for models of billions; a far smaller one wants more
Count = Annotated[int, Field(ge=1, lt=2**31)]


class SftSection(Section):
    """Worked answers to imitate before RLOO: where they come from, and how long they are trained on."""

    prefix: ClassVar[str] = "sft."

    source: str | None = key(
        None, "where the worked answers come from, as data.source; null: data.source", min_length=1
    )
    subset: str | None = key(
        None, "hub sources only: its configuration; null: data.subset, none where sft.source is set"
    )
    split: str | None = key(None, "the split that is read; null: data.split, train where sft.source is set")
    prompt_column: str | None = key(None, "null: data.prompt_column", min_length=1)
    completion_column: str = key(
        "completion", "column with the worked answer: all that the model is to write, or what follows the thinking "
        "where thinking_column is set",
        min_length=1,
    )  # fmt: skip
    thinking_column: str | None = key(
        None, "column with the thinking; null: the worked answer has it, closed by </think>", min_length=1
    )
    num_prompts: Count | None = key(None, "worked answers that are drawn; null for all")
    max_length: Count | None = key(
        None, "tokens of prompt and worked answer, above which a row is left out; null: model.max_seq_length"
    )
    max_steps: Count | None = key(None, "optimizer steps; wins over num_train_epochs")
    num_train_epochs: float = key(1.0, "passes over the worked answers, when max_steps is null", gt=0)
    learning_rate: float = key(
        LORA_SFT_RATE, "peak learning rate; it falls to 0 linearly", gt=0,
        follows=f"{FULL_SFT_RATE:g} with model.lora: null",
    )  # fmt: skip
    warmup_steps: float = key(0.05, "optimizer steps of warm-up; below 1, a share of the run", ge=0)
    per_device_train_batch_size: Count = key(4, "worked answers of one micro-step")
    gradient_accumulation_steps: Count = key(4, "micro-steps of one optimizer step")
    signal_prompts: int = key(
        64, "training prompts that get rloo.num_generations completions afterwards, to see whether RLOO has a signal; "
        "0: none",
        ge=0,
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_columns(self) -> "SftSection":
        if self.thinking_column == self.completion_column:
            raise ValueError(
                f"thinking_column and completion_column are both {self.completion_column!r}; name two columns, or set "
                "sft.thinking_column=null where one holds both"
            )
        return self

"""The sections of a run's configuration: every key, its type, its default and its bounds.

Each section is a strict pydantic model, so an unknown key, a wrong type or a value out of bounds is an error both when
a file is read and when a notebook assigns to a field. The keys of `rloo:` are TRL's own names and reach `RLOOConfig` as
they are; those that differ from TRL's default are listed in `RLOO_DEFAULTS_OF_OURS` and compared with TRL by a test. What
TRL offers beyond these keys (vLLM, DeepSpeed, several GPUs) is left out until the loop supports it.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rloo_kit.config_errors import accepts_bool, describe_type, explain_error
from rloo_kit.errors import ConfigError

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RLOO_DEFAULTS_OF_OURS = {
    "disable_dropout": "the reference and the policy must score the same tokens alike",
    "learning_rate": "TRL's 1e-6 is for full fine-tuning; a LoRA adapter kept in bf16 does not move at that size",
    "logging_steps": "one line of metrics a step: the health rules read them",
    "report_to": "a list, so that adding a tracker is adding an item",
}

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A strict group of keys: unknown keys, true where a number belongs, NaN and infinity are refused."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, values: Any) -> Any:
        """`num_iterations: true` would be read as 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if isinstance(value, bool) and field is not None and not accepts_bool(field.annotation):
                raise ValueError(f"{key} is {str(value).lower()}; it takes {describe_type(field.annotation)}")
        return values

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign `value` to the key `name` after the checks that a file goes through.

        Raises:
            ConfigError: the key is unknown or the section would not hold together; the old value stays.
        """
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        try:
            checked = type(self).model_validate({**dict(self), name: value})
        except ValidationError as error:
            raise ConfigError("\n".join(explain_error(entry, type(self)) for entry in error.errors())) from None
        super().__setattr__(name, getattr(checked, name))


class RunSection(Section):
    """Where a run's files go, what is printed while it trains, and when it stops itself."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str | None = Field(None, description="name of the run's folder; the config file's stem unless given")
    output_dir: str = Field("outputs", min_length=1, description="the run's folder is output_dir/name")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of sampling, shuffling and new adapters")
    evaluate: bool = Field(True, description="measure held-out accuracy before and after training")
    report: bool = Field(True, description="write report.html at the end")
    stop_when_no_signal: bool = Field(
        False, description="stop, instead of warning, when steps carry no learning signal"
    )
    no_signal_steps: Count = Field(5, description="steps in a row without signal before it says so")
    progress_every_s: float = Field(5.0, ge=0.0, description="seconds between two progress lines")
    sample_every_steps: int = Field(25, ge=0, description="steps between two tables of sample completions; 0 for none")
    num_samples: int = Field(2, ge=0, description="completions in such a table")
    max_reward_failure_share: Share = Field(
        0.5, description="share of samples with a failed reward above which a step counts as failed"
    )
    reward_failure_steps: Count = Field(3, description="failed steps in a row after which the run saves and stops")

    @model_validator(mode="after")
    def _check_name(self) -> "RunSection":
        if self.name is not None and (not self.name.strip(" .") or any(mark in self.name for mark in "/\\\0")):
            raise ValueError(f"name is {self.name!r}; it names a folder, so it has letters or digits and no slash")
        return self


class LoraSection(Section):
    """The adapter that is trained."""

    r: Count = Field(16, description="rank")
    alpha: float = Field(16, gt=0, description="scale; the update is multiplied by alpha / r")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the adapter's input; 0 keeps logps exact")
    target_modules: list[str] = Field(
        PROJECTIONS, min_length=1, description="layers that get an adapter; default: the seven projections"
    )


class ModelSection(Section):
    """The policy: which model, loaded how, trained through which adapter."""

    name: str = Field(min_length=1, description="hub id, local folder, embedded/thinking or embedded/instruct")
    family: Literal["auto", "thinking", "hybrid", "instruct", "plain"] = Field(
        "auto", description="how its chat template treats thinking; auto reads the template"
    )
    enable_thinking: bool | None = Field(None, description="hybrid models only: think or not; null leaves the template's own")
    backend: Literal["auto", "unsloth", "transformers"] = Field("auto", description="auto: Unsloth where it is usable")
    load_in_4bit: bool = Field(False, description="4-bit weights (bitsandbytes NF4)")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto: by the machine's precision")
    max_seq_length: int = Field(2048, ge=16, description="tokens of prompt and completion together")
    adapter: str | None = Field(None, description="folder of an adapter to continue")
    gradient_checkpointing: bool | Literal["unsloth"] = Field(
        False, description="recompute activations to save memory; 'unsloth' also offloads them"
    )
    lora: LoraSection | None = Field(default_factory=LoraSection, description="adapter; null trains every parameter")
    vocabulary: Literal["compact", "qwen3"] = Field("compact", description="embedded models only: rows of the embedding")
    build_seed: int = Field(0, ge=0, lt=2**32, description="embedded models only: seed of the cold start")

    @property
    def is_embedded(self) -> bool:
        """True for the models that the kit builds itself."""
        return self.name.startswith("embedded/")

    @model_validator(mode="after")
    def _check_consistency(self) -> "ModelSection":
        if self.is_embedded and self.name not in ("embedded/thinking", "embedded/instruct"):
            raise ValueError(f"name is '{self.name}'; the embedded models are embedded/thinking and embedded/instruct")
        if self.enable_thinking is not None and self.family not in ("auto", "hybrid"):
            raise ValueError(
                f"enable_thinking is {str(self.enable_thinking).lower()}, but family is '{self.family}'; only hybrid "
                "models take it: set model.family=hybrid or model.enable_thinking=null"
            )
        return self


class DataSection(Section):
    """Prompts: where they come from, which columns, how they are split."""

    source: str = Field(min_length=1, description="embedded/addition, a hub id, or a .jsonl, .csv or .parquet path")
    subset: str | None = Field(None, description="hub sources only: the configuration's name, 'main' for gsm8k")
    split: str = Field("train", description="hub sources only: the split that is read")
    prompt_column: str = Field("prompt", min_length=1, description="column with the prompt, text or messages")
    answer_column: str = Field("answer", min_length=1, description="column with the gold answer")
    answer_after: str | None = Field(
        None, min_length=1, description="the gold answer is what follows the last such marker, '####' for gsm8k"
    )
    system_prompt: str | None = Field(None, description="system message put before every prompt")
    num_prompts: Count | None = Field(None, description="read at most so many prompts, test included; null for all")
    test_size: int | float = Field(0.1, ge=0, description="held-out prompts: a number, or a share below 1")
    max_prompt_length: Count = Field(256, description="tokens of a prompt, template included")
    too_long: Literal["drop", "refuse"] = Field("drop", description="what happens to longer prompts")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the split")

    @model_validator(mode="after")
    def _check_test_size(self) -> "DataSection":
        if isinstance(self.test_size, float) and self.test_size >= 1 and self.test_size != int(self.test_size):
            raise ValueError(f"test_size is {self.test_size}; a share is below 1, a number of prompts is whole")
        if self.num_prompts is not None and self.test_size >= self.num_prompts:
            raise ValueError(
                f"test_size ({self.test_size}) leaves none of num_prompts ({self.num_prompts}) to train on; "
                "lower data.test_size or raise data.num_prompts"
            )
        return self


class RewardSection(Section):
    """One reward: its name in the registry or `module:function`, its weight and its parameters."""

    name: str = Field(min_length=1, description="a registered reward or module:function of your own")
    weight: float = Field(1.0, description="factor of this reward in the sum")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")
    timeout_s: float = Field(30.0, gt=0, description="module:function only: seconds before a call counts as failed")


def _read_report_to(value: Any) -> Any:
    """TRL takes 'none', a name or a list; the file keeps a list."""
    if value is None or value == "none":
        return []
    return [value] if isinstance(value, str) else value


class RLOOSection(Section):
    """The loop: TRL's own names, passed to `RLOOConfig` as they are."""

    max_steps: Count | None = Field(None, description="optimizer steps; wins over num_train_epochs")
    num_train_epochs: float | None = Field(None, gt=0, description="passes over the prompts, when max_steps is null")
    learning_rate: float = Field(1e-5, ge=0, description="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = Field(
        "linear", description="shape of the learning rate over the run"
    )
    warmup_steps: float = Field(0, ge=0, description="optimizer steps of warm-up; below 1, a share of the run")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are scaled down to this norm; 0 leaves them")
    optim: Literal[
        "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd"
    ] = Field("adamw_torch_fused", description="optimizer; the 8-bit ones need a GPU")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    adam_epsilon: float = Field(1e-8, gt=0, description="term that keeps Adam's division finite")
    per_device_train_batch_size: Count = Field(8, description="completions in one forward and backward pass")
    gradient_accumulation_steps: Count = Field(1, description="such passes in one optimizer step")
    steps_per_generation: Count | None = Field(
        None, description="such passes fed by one rollout; null: gradient_accumulation_steps"
    )
    num_generations: int = Field(2, ge=2, description="completions of each prompt, K; the baseline needs siblings")
    num_iterations: Count = Field(1, description="times each rollout is used; above 1 the ratio is clipped")
    beta: float = Field(0.05, ge=0, description="KL coefficient; 0 loads and runs no reference")
    kl_form: Literal["sum", "length_normalized", "per_token"] = Field(
        "sum", description="KL in the reward: sum over the completion, its mean a token, or per token"
    )
    reference: Literal["start", "base"] = Field("start", description="KL against the start of training or the base model")
    epsilon: float = Field(0.2, gt=0, lt=1, description="ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = Field(None, gt=0, description="and above 1 + epsilon_high; null: epsilon")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of the rollout")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; below 1 the sampled and the scored distribution differ")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all; same caution as top_p")
    min_p: float | None = Field(None, ge=0, le=1, description="drop tokens below this share of the likeliest one")
    repetition_penalty: float = Field(1.0, gt=0, description="1 is off; same caution as top_p")
    max_completion_length: Count = Field(512, description="tokens of a completion, thinking included")
    mask_truncated_completions: bool = Field(False, description="truncated completions are left out of the loss")
    missing_eos_penalty: float | None = Field(None, gt=0, description="subtracted from a truncated completion's reward")
    reward_clip_range: tuple[float, float] | None = Field(None, description="[lowest, highest] summed reward")
    normalize_rewards: bool = Field(False, description="rewards of a generation batch to mean 0 and deviation 1")
    normalize_advantages: bool = Field(False, description="advantages of a generation batch likewise")
    disable_dropout: bool = Field(True, description="dropout off in the policy, as the reference needs")
    shuffle_dataset: bool = Field(True, description="draw the prompts in random order")
    bf16: bool | None = Field(None, description="null: decided by the machine")
    fp16: bool | None = Field(None, description="null: decided by the machine")
    logging_steps: Count = Field(1, description="optimizer steps between two rows of metrics.jsonl")
    save_steps: Count = Field(500, description="optimizer steps between two checkpoints")
    save_total_limit: Count | None = Field(None, description="checkpoints kept; null keeps all")
    report_to: Annotated[list[str], BeforeValidator(_read_report_to)] = Field(
        default_factory=list, description="trackers besides metrics.jsonl: tensorboard, trackio, wandb"
    )

    @property
    def generation_batch_size(self) -> int:
        """Completions of one rollout over all processes."""
        passes = self.steps_per_generation or self.gradient_accumulation_steps
        return self.per_device_train_batch_size * count_processes() * passes

    @property
    def prompts_per_generation(self) -> int:
        """Prompts of one rollout over all processes."""
        return self.generation_batch_size // self.num_generations

    def to_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `RLOOConfig`: the keys that are set, under the names they have here."""
        values = self.model_dump(exclude_none=True)
        values["report_to"] = values["report_to"] or "none"
        return values

    @model_validator(mode="after")
    def _check_consistency(self) -> "RLOOSection":
        if self.max_steps is None and self.num_train_epochs is None:
            raise ValueError("the length of training is open; set rloo.max_steps or rloo.num_train_epochs")
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; set one of them to null or false")
        if self.reward_clip_range is not None and self.reward_clip_range[0] >= self.reward_clip_range[1]:
            low, high = self.reward_clip_range
            raise ValueError(f"reward_clip_range is [{low}, {high}]; the first number must be below the second")
        check_generation_batch(
            self.per_device_train_batch_size,
            self.steps_per_generation or self.gradient_accumulation_steps,
            self.num_generations,
            passes_key="steps_per_generation" if self.steps_per_generation else "gradient_accumulation_steps",
        )
        return self


class EvalSection(Section):
    """What is measured on the held-out prompts."""

    num_prompts: Count | None = Field(None, description="held-out prompts that are used; null for all")
    num_samples: Count = Field(1, description="completions of each prompt")
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    greedy: bool = Field(True, description="also measure greedy accuracy")
    pass_at_k: list[Count] = Field(default_factory=list, description="report pass@k for these k")
    max_completion_length: Count | None = Field(None, description="tokens of a completion; null: rloo's")
    batch_size: Count = Field(128, description="completions generated at once")
    thinking_budgets: list[Count] = Field(
        default_factory=list, description="also measure accuracy with thinking closed at these tokens"
    )
    answer_budget: Count = Field(32, description="tokens left for the answer after a forced close")
    num_completions: int = Field(10, ge=0, description="completions kept for the report")

    @model_validator(mode="after")
    def _check_pass_at_k(self) -> "EvalSection":
        if self.pass_at_k and max(self.pass_at_k) > self.num_samples:
            raise ValueError(
                f"pass_at_k asks for {max(self.pass_at_k)} completions of a prompt, num_samples gives "
                f"{self.num_samples}; set eval.num_samples={max(self.pass_at_k)}"
            )
        return self


def count_processes() -> int:
    """Processes of a distributed run (WORLD_SIZE, which launchers set); 1 without one."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"the environment's WORLD_SIZE is {text!r}; a launcher sets it to a whole number, 1 or more")
    return int(text)


def check_generation_batch(
    per_device: int, passes: int, num_generations: int, passes_key: str = "steps_per_generation"
) -> None:
    """Refuse a rollout that does not hold whole groups, and name the nearest numbers that work.

    >>> check_generation_batch(8, 1, 4)

    Raises:
        ConfigError: per_device x processes x passes is not a multiple of num_generations.
    """
    processes = count_processes()
    total = per_device * processes * passes
    if total % num_generations == 0:
        return
    group_sizes = [k for k in range(2, total + 1) if total % k == 0]
    fitting = [f"num_generations={k}" for k in _nearest(group_sizes, num_generations)]
    fitting += [f"{passes_key}={p}" for p in _nearest_multiples(per_device * processes, num_generations, passes)]
    fitting += [
        f"per_device_train_batch_size={b}" for b in _nearest_multiples(processes * passes, num_generations, per_device)
    ]
    raise ConfigError(
        f"a rollout has {per_device} completions a pass (per_device_train_batch_size) x {processes} "
        f"process{'es' if processes > 1 else ''} x {passes} pass{'es' if passes > 1 else ''} ({passes_key}) = {total} "
        f"completions, which does not divide into whole groups of {num_generations} (num_generations). The nearest that "
        f"work: {' or '.join(fitting)}"
    )


def _nearest(candidates: list[int], wanted: int) -> list[int]:
    """The candidates next to `wanted` on either side."""
    below = [c for c in candidates if c < wanted][-1:]
    above = [c for c in candidates if c > wanted][:1]
    return below + above


def _nearest_multiples(unit: int, group: int, wanted: int) -> list[int]:
    """Values next to `wanted` for which value x unit is a multiple of `group`."""
    step = next(value for value in range(1, group + 1) if value * unit % group == 0)
    return [value for value in (wanted // step * step, (wanted // step + 1) * step) if value >= 1]

"""The sections of a run's configuration: every key, its type, its default and its bounds.

Each section is a strict pydantic model, so an unknown key, a wrong type or a value out of bounds is an error both when
a file is read and when a notebook assigns to a field. The keys of `rloo:` are TRL's own names and reach `RLOOConfig` as
they are; those that differ from TRL's default are listed in `RLOO_DEFAULTS_OF_OURS` and compared with TRL by a test.
What TRL offers beyond these keys is left out until the loop supports it; how many processes there are, and whether they
share or shard the model, is the launch file's business.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rloo_kit.config.checks import check_generation_batch, find_loop_problems, find_server_problems
from rloo_kit.config.messages import accepts_bool, describe_type, explain_error
from rloo_kit.errors import ConfigError
from rloo_kit.system.processes import count_processes

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RLOO_DEFAULTS_OF_OURS = {
    "disable_dropout": "the reference and the policy must score the same tokens alike",
    "learning_rate": "TRL's 1e-6 is for full fine-tuning; a LoRA adapter kept in bf16 does not move at that size",
    "logging_steps": "one line of metrics a step: the health rules read them",
    "report_to": "a list, so that adding a tracker is adding an item",
}

Tracker = Literal[
    "tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "swanlab", "clearml", "neptune", "dvclive", "dagshub",
    "azure_ml", "codecarbon", "flyte", "kubeflow",
]  # fmt: skip
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Section(BaseModel):
    """A strict group of keys: unknown keys, true where a number belongs, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())
    prefix: ClassVar[str] = ""  # of its keys, for the errors of an assignment

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
            faults = [explain_error(entry, type(self), self.prefix) for entry in error.errors()]
            raise ConfigError("\n".join(faults)) from None
        super().__setattr__(name, getattr(checked, name))


class RunSection(Section):
    """Where a run's files go, what is printed while it trains, and when it stops itself."""

    prefix: ClassVar[str] = "run."
    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str | None = Field(default=None, description="name of the run's folder; the config file's stem unless given")
    output_dir: str = Field(default="outputs", min_length=1, description="the run's folder is output_dir/name")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of sampling, shuffling and new adapters")
    evaluate: bool = Field(default=True, description="measure held-out accuracy before and after training")
    report: bool = Field(default=True, description="write report.html at the end")
    stop_when_no_signal: bool = Field(
        default=False, description="stop, instead of warning, when steps carry no learning signal"
    )
    no_signal_steps: Count = Field(default=5, description="steps in a row without signal before it says so")
    progress_every_s: float = Field(default=5.0, ge=0.0, description="seconds between two progress lines")
    sample_every_steps: int = Field(
        default=25, ge=0, description="steps between two tables of sample completions; 0 for none"
    )
    num_samples: int = Field(default=2, ge=0, description="completions in such a table")
    max_reward_failure_share: Share = Field(
        default=0.5, description="share of samples with a failed reward above which a step counts as failed"
    )
    reward_failure_steps: Count = Field(
        default=3, description="failed steps in a row after which the run saves and stops"
    )
    max_skipped_steps: Count = Field(
        default=3, description="steps in a row skipped for NaN or infinity, after which the run saves and stops"
    )

    @model_validator(mode="after")
    def _check_name(self) -> "RunSection":
        if self.name is not None and (not self.name.strip(" .") or any(mark in self.name for mark in "/\\\0")):
            raise ValueError(f"name is {self.name!r}; it names a folder, so it has letters or digits and no slash")
        return self


class LoraSection(Section):
    """The adapter that is trained."""

    prefix: ClassVar[str] = "model.lora."
    r: Count = Field(default=16, description="rank")
    alpha: float = Field(default=16, gt=0, description="scale; the update is multiplied by alpha / r")
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="dropout on the adapter's input; 0 keeps logps exact"
    )
    target_modules: list[str] = Field(
        default=PROJECTIONS, min_length=1, description="layers that get an adapter; default: the seven projections"
    )


class ModelSection(Section):
    """The policy: which model, loaded how, trained through which adapter."""

    prefix: ClassVar[str] = "model."
    name: str = Field(min_length=1, description="hub id, local folder, embedded/thinking or embedded/instruct")
    family: Literal["auto", "thinking", "hybrid", "instruct", "plain"] = Field(
        default="auto", description="how its chat template treats thinking; auto reads the template"
    )
    enable_thinking: bool | None = Field(
        default=None, description="hybrid models only: think or not; null leaves the template's own"
    )
    backend: Literal["auto", "unsloth", "transformers"] = Field(
        default="auto", description="auto: Unsloth where it is usable"
    )
    load_in_4bit: bool = Field(default=False, description="4-bit weights (bitsandbytes NF4)")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: by the machine's precision"
    )
    max_seq_length: int = Field(default=2048, ge=16, description="tokens of prompt and completion together")
    adapter: str | None = Field(default=None, description="folder of an adapter to continue")
    gradient_checkpointing: bool | Literal["unsloth"] = Field(
        default=False, description="recompute activations to save memory; 'unsloth' also offloads them"
    )
    lora: LoraSection | None = Field(
        default_factory=lambda: LoraSection(), description="adapter; null trains every parameter"
    )
    vocabulary: Literal["compact", "qwen3"] = Field(
        default="compact", description="embedded models only: rows of the embedding"
    )
    build_seed: int = Field(default=0, ge=0, lt=2**32, description="embedded models only: seed of the cold start")

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

    prefix: ClassVar[str] = "data."
    source: str = Field(min_length=1, description="embedded/addition, a hub id, or a .jsonl, .csv or .parquet path")
    subset: str | None = Field(default=None, description="hub sources only: the configuration's name, 'main' for gsm8k")
    split: str = Field(default="train", description="hub sources only: the split that is read")
    prompt_column: str = Field(default="prompt", min_length=1, description="column with the prompt, text or messages")
    answer_column: str = Field(default="answer", min_length=1, description="column with the gold answer")
    answer_after: str | None = Field(
        default=None, min_length=1, description="the gold answer is what follows the last such marker, '####' for gsm8k"
    )
    system_prompt: str | None = Field(default=None, description="system message put before every prompt")
    num_prompts: Count | None = Field(
        default=None, description="read at most so many prompts, test included; null for all"
    )
    test_size: int | float = Field(default=0.1, ge=0, description="held-out prompts: a number, or a share below 1")
    max_prompt_length: Count = Field(default=256, description="tokens of a prompt, template included")
    too_long: Literal["drop", "refuse"] = Field(default="drop", description="what happens to longer prompts")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the split")

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

    prefix: ClassVar[str] = "rewards.N."
    name: str = Field(min_length=1, description="a registered reward or module:function of your own")
    weight: float = Field(default=1.0, description="factor of this reward in the sum")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")
    timeout_s: float = Field(
        default=30.0, gt=0, description="module:function only: seconds before a call counts as failed"
    )


def _read_report_to(value: Any) -> Any:
    """TRL takes 'none', a name or a list; the file keeps a list."""
    if value is None or value == "none":
        return []
    return [value] if isinstance(value, str) else value


class RLOOSection(Section):
    """The loop, passed to `RLOOConfig` under the same names: TRL's own, and the kit's where TRL has none."""

    prefix: ClassVar[str] = "rloo."
    max_steps: Count | None = Field(default=None, description="optimizer steps; wins over num_train_epochs")
    num_train_epochs: float | None = Field(
        default=None, gt=0, description="passes over the prompts, when max_steps is null"
    )
    learning_rate: float = Field(default=1e-5, ge=0, description="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = Field(
        default="linear", description="shape of the learning rate over the run"
    )
    warmup_steps: float = Field(default=0, ge=0, description="optimizer steps of warm-up; below 1, a share of the run")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(default=1.0, ge=0, description="gradients are scaled down to this norm; 0 leaves them")
    optim: Literal[
        "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd"
    ] = Field(default="adamw_torch_fused", description="optimizer; the 8-bit ones need a GPU")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="term that keeps Adam's division finite")
    per_device_train_batch_size: Count = Field(default=8, description="completions of one micro-step")
    gradient_accumulation_steps: Count = Field(default=1, description="micro-steps of one optimizer step")
    steps_per_generation: Count | None = Field(
        default=None, description="micro-steps fed by one rollout; null: gradient_accumulation_steps"
    )
    memory: Literal["fast", "balanced", "low"] = Field(
        default="fast", description="graphs kept group by group, log-probs first, or one sequence at a time"
    )
    tokens_per_pass: Count | None = Field(
        default=None, description="tokens in one forward and backward pass; null: by the machine"
    )
    num_generations: int = Field(
        default=2, ge=2, lt=2**31, description="completions of each prompt, K; the baseline needs siblings"
    )
    num_iterations: Count = Field(default=1, description="times each rollout is used; above 1 the ratio is clipped")
    beta: float = Field(default=0.05, ge=0, description="KL coefficient; 0 loads and runs no reference")
    kl_form: Literal["sum", "length_normalized", "per_token"] = Field(
        default="sum", description="KL in the reward: sum over the completion, its mean a token, or per token"
    )
    reference: Literal["start", "base"] = Field(
        default="start", description="KL against the start of training or the base model"
    )
    ratio_form: Literal["sum", "length_normalized", "per_token"] | None = Field(
        default=None, description="ratio of a completion, of its mean token (GSPO) or of each; null: as kl_form needs"
    )
    epsilon: float = Field(default=0.2, gt=0, lt=1, description="ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = Field(default=None, gt=0, description="and above 1 + epsilon_high; null: epsilon")
    delta: float | None = Field(
        default=None, gt=1, description="bound on the ratio where the advantage is negative; null: none, as in TRL"
    )
    baseline: Literal["leave_one_out", "group_mean", "none"] = Field(
        default="leave_one_out", description="what a reward is compared with: its siblings, its whole group, nothing"
    )
    baseline_includes_masked: bool = Field(
        default=True, description="false: what mask_truncated_completions masks leaves the siblings' baseline too"
    )
    sampler_correction: Literal["none", "sequence", "token"] = Field(
        default="none", description="weigh by the trainer's over the sampler's probability, whole or token by token"
    )
    sampler_correction_cap: float = Field(default=2.0, ge=1, description="such a weight is cut off here")
    temperature: float = Field(default=1.0, gt=0, description="of sampling and of scoring alike")
    top_p: float = Field(default=1.0, gt=0, le=1, description="only 1: a filter is not part of what is scored")
    top_k: int = Field(default=0, ge=0, description="only 0, for the same reason")
    min_p: float | None = Field(default=None, ge=0, le=1, description="only null or 0, for the same reason")
    repetition_penalty: float = Field(default=1.0, gt=0, description="only 1, for the same reason")
    max_completion_length: Count = Field(default=512, description="tokens of a completion, thinking included")
    thinking_budget: Count | None = Field(
        default=None, description="tokens of thinking after which it is closed by force; null: never"
    )
    answer_budget: Count | None = Field(
        default=None, description="tokens for the answer after a forced close; null: what is left"
    )
    thinking_close: Literal["tag", "sentence"] = Field(
        default="tag", description="what closes it: </think> alone, or a closing sentence before it"
    )
    mask_truncated_completions: bool = Field(
        default=False, description="truncated completions are left out of the loss"
    )
    missing_eos_penalty: float | None = Field(
        default=None, gt=0, description="subtracted from a truncated completion's reward"
    )
    reward_clip_range: tuple[float, float] | None = Field(default=None, description="[lowest, highest] summed reward")
    normalize_rewards: bool | Literal["running"] = Field(
        default=False, description="rewards to mean 0 and deviation 1, of their rollout or of all so far"
    )
    normalize_advantages: bool = Field(default=False, description="advantages of a generation batch likewise")
    disable_dropout: bool = Field(default=True, description="dropout off in the policy; false is refused")
    shuffle_dataset: bool = Field(default=True, description="draw the prompts in random order")
    bf16: bool | None = Field(default=None, description="null: decided by the machine")
    fp16: bool | None = Field(default=None, description="null: decided by the machine")
    logging_steps: Count = Field(default=1, description="optimizer steps between two rows of metrics.jsonl")
    save_steps: Count = Field(default=500, description="optimizer steps between two checkpoints")
    save_total_limit: Count | None = Field(default=None, description="checkpoints kept; null keeps all")
    report_to: Annotated[list[Tracker], BeforeValidator(_read_report_to)] = Field(
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
        if not self.disable_dropout:
            raise ValueError(
                "disable_dropout is false, but dropout is always off while completions are scored: with it the ratio "
                "would compare two random parts of the policy. Set rloo.disable_dropout=true"
            )
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; set one of them to null or false")
        if self.reward_clip_range is not None and self.reward_clip_range[0] >= self.reward_clip_range[1]:
            low, high = self.reward_clip_range
            raise ValueError(f"reward_clip_range is [{low}, {high}]; the first number must be below the second")
        problems = find_loop_problems(dict(self), self.prefix)
        if problems:
            raise ValueError("\n".join(problems))
        check_generation_batch(
            self.per_device_train_batch_size,
            self.steps_per_generation or self.gradient_accumulation_steps,
            self.num_generations,
            passes_key="steps_per_generation" if self.steps_per_generation else "gradient_accumulation_steps",
        )
        return self


def _refuse_removed_engine(value: Any) -> Any:
    if value == "continuous":
        raise ValueError("is 'continuous', an engine that was removed; set rollout.engine=auto (or native, generate)")
    return value


class RolloutSection(Section):
    """How completions are sampled, and which prompts they are spent on."""

    prefix: ClassVar[str] = "rollout."
    engine: Annotated[
        Literal["auto", "native", "generate", "vllm", "server"], BeforeValidator(_refuse_removed_engine)
    ] = Field(default="auto", description="what samples; auto: the fastest that the backend and the machine offer")
    rows: Count | None = Field(default=None, description="completions generated at once; null: planned by the memory")
    server_url: str | None = Field(
        default=None, description="http://host:port of a vLLM server, for the engines server and vllm"
    )
    server_adapters: str | None = Field(
        default=None,
        description="folder that trainer and server both see, for the engine server; null: one in the run's folder",
    )
    cache: Literal["plain", "int8", "offloaded"] = Field(
        default="plain", description="keys and values of a rollout: as the model's, in 8 bits, or in host memory"
    )
    resample_rounds: int = Field(
        default=0, ge=0, description="times a rollout's groups without signal get fresh prompts; 0: never"
    )
    difficulty_samples: int = Field(
        default=0, ge=0, description="completions of each prompt that measure its pass rate before training; 0: none"
    )
    min_pass_rate: Share = Field(default=0.0, description="prompts with a pass rate of at most this are skipped")
    max_pass_rate: Share = Field(default=1.0, description="and those with one of at least this")

    def to_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `RLOOConfig`; what chooses prompts before training is not among them."""
        return {
            "rollout_engine": self.engine,
            "rollout_rows": self.rows,
            "rollout_cache": self.cache,
            "rollout_server_url": self.server_url,
            "rollout_server_adapters": self.server_adapters,
            "resample_rounds": self.resample_rounds,
        }

    @model_validator(mode="after")
    def _check_server(self) -> "RolloutSection":
        problems = find_server_problems(self.engine, self.server_url, "rollout.engine", "rollout.server_url")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _check_pass_rates(self) -> "RolloutSection":
        if self.min_pass_rate >= self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) is not below max_pass_rate ({self.max_pass_rate}), so every "
                "prompt would be skipped; lower rollout.min_pass_rate"
            )
        if self.difficulty_samples == 0 and (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0):
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) and max_pass_rate ({self.max_pass_rate}) choose prompts by a "
                "pass rate that is not measured; set rollout.difficulty_samples=8"
            )
        return self


class EvalSection(Section):
    """What is measured on the held-out prompts."""

    prefix: ClassVar[str] = "eval."
    num_prompts: Count | None = Field(default=None, description="held-out prompts that are used; null for all")
    num_samples: Count = Field(default=1, description="completions of each prompt")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0 is greedy")
    greedy: bool = Field(default=True, description="also measure greedy accuracy")
    pass_at_k: list[Count] = Field(default_factory=list, description="report pass@k for these k")
    max_completion_length: Count | None = Field(default=None, description="tokens of a completion; null: rloo's")
    batch_size: Count = Field(default=128, description="completions generated at once")
    thinking_budgets: list[Count] = Field(
        default_factory=list, description="also measure accuracy with thinking closed at these tokens"
    )
    answer_budget: Count = Field(default=32, description="tokens left for the answer after a forced close")
    num_completions: int = Field(default=10, ge=0, description="completions kept for the report")

    @model_validator(mode="after")
    def _check_pass_at_k(self) -> "EvalSection":
        if self.pass_at_k and max(self.pass_at_k) > self.num_samples:
            raise ValueError(
                f"pass_at_k asks for {max(self.pass_at_k)} completions of a prompt, num_samples gives "
                f"{self.num_samples}; set eval.num_samples={max(self.pass_at_k)}"
            )
        return self

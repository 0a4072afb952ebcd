"""The sections of a run's configuration: strict pydantic models, each key with type, default, bounds and description.

A key is declared only here. `RLOOConfig` gets the fields, defaults, bounds and help of the loop's options from here.
"""

import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, ValidationInfo, model_validator

from rloo_kit.config.checks import (
    GENERATIONS,
    PROMPTS,
    HealthRule,
    find_batch_problems,
    find_gym_problem,
    find_test_problem,
    find_tool_problems,
)
from rloo_kit.config.model_names import EMBEDDED_PREFIX, SMOLLM2, SMOLLM2_PREFIX, find_embedded_problem, find_near_miss
from rloo_kit.config.section import Section, TrlDefault, key
from rloo_kit.system.input_files import places_of
from rloo_kit.system.processes import count_processes

LORA_LEARNING_RATE, FULL_LEARNING_RATE = 1e-4, 1e-5  # measured on the embedded model: docs/benchmarks.md

Tracker = Literal[
    "tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "swanlab", "clearml", "neptune", "dvclive", "dagshub",
    "azure_ml", "codecarbon", "flyte", "kubeflow",
]  # fmt: skip


def _refuse_near_miss(name: str, info: ValidationInfo) -> str:
    """A misspelt built-in name, which the hub would be asked for; a folder or file may have such a name."""
    found = find_near_miss(name, for_models=info.field_name in ("name", "model"))
    if found and not any(map(os.path.exists, places_of(name, "", info.context and info.context.parent))):
        raise ValueError(f"is {name}, which is not built in; did you mean {found}?")
    return name


Named = Annotated[str, Field(min_length=1), AfterValidator(_refuse_near_miss)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class RunSection(Section):
    """Where a run's files go, what it prints, and when it stops."""

    prefix: ClassVar[str] = "run."
    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str | None = key(None, "name of the run's folder; null: the config file's stem")
    output_dir: str = key("outputs", "the run's folder is output_dir/name", min_length=1)
    seed: int = key(
        0, "seed of sampling, shuffling and new adapters", ge=0, lt=2**32, argument="seed",
        trl=TrlDefault(42, "every seed of a file defaults to 0"),
    )  # fmt: skip
    preflight: bool = key(False, "run the preflight before training; NO-GO stops the run")
    evaluate: bool = key(True, "evaluate held-out prompts before and after training")
    report: bool = key(True, "write report.html at the end")
    progress_every_s: float = key(5.0, "seconds between progress lines", ge=0.0)
    sample_every_steps: int = key(25, "steps between tables of sample completions; 0 for none", ge=0)
    num_samples: Count = key(2, "completions in such a table")
    save_every_minutes: float | None = key(
        15.0, "minutes between checkpoints in addition to rloo.save_steps; null: none", gt=0.0
    )
    max_reward_failure_share: Share = key(
        0.5, "a step fails if more than this share of its samples has a failed reward; three in a row stop the run",
        argument="max_reward_failure_share",
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_name(self) -> "RunSection":
        if self.name is not None and (not self.name.strip(" .") or any(mark in self.name for mark in "/\\\0")):
            raise ValueError(f"name is {self.name!r}; it names a folder, so it has letters or digits and no slash")
        return self


class LoraSection(Section):
    """The adapter that is trained."""

    prefix: ClassVar[str] = "model.lora."
    r: Count = key(16, "rank")
    alpha: float = key(16, "scale: the update is multiplied by alpha / r", gt=0)
    target_modules: list[str] | None = key(
        None, "layers with an adapter; null: all linear layers of the blocks", min_length=1
    )
    vision: bool = key(False, "train the vision tower too; it is frozen otherwise")


class ModelSection(Section):
    """The policy: which model, loaded how, trained through which adapter."""

    prefix: ClassVar[str] = "model."
    name: Named = Field(
        description="hub id, local folder, embedded/thinking, embedded/thinking@FAMILY, embedded/instruct, "
        "embedded/untaught, smollm2/instruct, smollm2/thinking, smollm2/tools",
    )
    family: Literal["auto", "thinking", "hybrid", "instruct", "plain"] = key(
        "auto", "how its chat template treats thinking; auto reads the template"
    )
    enable_thinking: bool | None = key(
        None, "hybrid models: think or not; null: the template's default, refused if that is not to think"
    )
    backend: Literal["auto", "unsloth", "transformers"] = key("auto", "auto: Unsloth if it is usable")
    load_in_4bit: bool = key(False, "4-bit weights (bitsandbytes NF4)")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key("auto", "auto: the machine's precision")
    max_seq_length: int = key(
        2048, "tokens of prompt and completion together", ge=16,
        follows="6144 for a Thinking model, 160 for an embedded one; more if the lengths you set need it",
    )  # fmt: skip
    vision: bool | None = key(None, "load the vision tower; null: only if the model has no class without it (Qwen3-VL)")
    adapter: str | None = key(None, "folder of an adapter to continue")
    gradient_checkpointing: bool | Literal["unsloth"] = key(
        False, "recompute activations to save memory; unsloth also offloads them"
    )
    lora: LoraSection | None = Field(default_factory=LoraSection, description="adapter; null trains every parameter")

    @property
    def is_embedded(self) -> bool:
        """True for the models that the kit builds itself."""
        return self.name.startswith(EMBEDDED_PREFIX)

    @model_validator(mode="after")
    def _check_consistency(self) -> "ModelSection":
        if self.is_embedded and (problem := find_embedded_problem(self.name)):
            raise ValueError(f"name is '{self.name}', but {problem}")
        if self.name.startswith(SMOLLM2_PREFIX) and self.name not in SMOLLM2:
            raise ValueError(f"name is '{self.name}', but of SmolLM2 there are {' and '.join(SMOLLM2)}")
        if self.enable_thinking is not None and self.family not in ("auto", "hybrid"):
            raise ValueError(
                f"enable_thinking is {str(self.enable_thinking).lower()}, but family is '{self.family}'; only hybrid "
                "models take it: set model.family=hybrid or model.enable_thinking=null"
            )
        return self


class SourceSection(Section):
    """One source of a mix."""

    prefix: ClassVar[str] = "data.sources.N."
    source: Named = Field(description="as data.source")
    weight: float = key(1.0, "rows are drawn in proportion to the weights", gt=0)
    subset: str | None = key(None, "null: data.subset")
    split: str | None = key(None, "null: data.split")
    prompt_column: str | None = key(None, "null: data.prompt_column", min_length=1)
    answer_column: str | None = key(None, "null: data.answer_column", min_length=1)
    answer_after: str | None = key(None, "null: data.answer_after", min_length=1)
    options: dict[str, JsonValue] | None = key(None, "null: data.options")

    @model_validator(mode="after")
    def _check_options(self) -> "SourceSection":
        if problem := find_gym_problem([self.source], self):
            raise ValueError(problem)
        return self


class DataSection(Section):
    """Prompts: where they come from, which columns, how they are split."""

    prefix: ClassVar[str] = "data."
    source: Named | None = key(
        None, "embedded/FAMILY, reasoning_gym/TASK, a hub id, or a .jsonl, .csv or .parquet file; "
        "required without sources",
    )  # fmt: skip
    sources: list[SourceSection] | None = key(None, "a mix instead of source; see below", min_length=1)
    subset: str | None = key(None, "hub only: the configuration, such as main for gsm8k")
    split: str = key("train", "the split to read (hub)")
    test_source: Named | None = key(None, "source of the held-out prompts; null: source")
    test_split: str | None = key(None, "the held-out split (hub); null: test if test_source is set", min_length=1)
    prompt_column: str = key("prompt", "column with the prompt, text or messages", min_length=1)
    answer_column: str = key("answer", "column with the gold answer", min_length=1)
    answer_after: str | None = key(
        None, "the gold answer is the text after the last such marker, such as ####", min_length=1
    )
    options: dict[str, JsonValue] | None = key(None, "reasoning_gym only: the task's options, such as {min_terms: 2}")
    system_prompt: str | None = key(None, "system message of every prompt that has none")
    num_prompts: Count | None = key(
        None, "most prompts to read, held-out ones included unless read separately; null: all"
    )
    test_size: int | float = key(
        0.1, "held-out prompts: a count, or a share below 1; if read separately, a count, below 1 all", ge=0
    )
    max_prompt_length: Count = key(
        512,
        "tokens of a prompt, template included; longer ones are left out",
        follows="a quarter of model.max_seq_length",
    )
    max_pixels: int = key(262_144, "larger images are scaled down to it: 256 tokens of Qwen3-VL", ge=1024)

    @property
    def all_sources(self) -> list[str]:
        """`source`, or those of the mix."""
        return [entry.source for entry in self.sources] if self.sources else [str(self.source)]

    @property
    def separate_test(self) -> bool:
        """Whether the held-out prompts are read separately rather than split off."""
        return self.test_source is not None or self.test_split is not None

    @model_validator(mode="after")
    def _check_sources(self) -> "DataSection":
        if (self.source is None) == (self.sources is None):
            found = "neither source nor sources is there" if self.source is None else "source and sources are both set"
            raise ValueError(f"{found}; give one of the two: data.source=..., or data.sources for a mix")
        read = [*self.all_sources, *([self.test_source] if self.test_source else [])]
        problem = find_test_problem(self.source, self.test_source, self.split, self.test_split)
        if problem := problem or find_gym_problem(read, self):
            raise ValueError(problem)
        if isinstance(self.test_size, float) and self.test_size >= 1 and self.test_size != int(self.test_size):
            raise ValueError(f"test_size is {self.test_size}; a share is below 1, a number of prompts is whole")
        if self.num_prompts is not None and self.test_size >= self.num_prompts and not self.separate_test:
            raise ValueError(
                f"test_size ({self.test_size}) leaves none of num_prompts ({self.num_prompts}) to train on; "
                "lower data.test_size or raise data.num_prompts"
            )
        return self


def _check_variable(name: str) -> str:
    if not name.isascii() or not name.isidentifier():
        raise ValueError("takes names of environment variables, made of letters, digits and _: OPENAI_API_KEY")
    return name


class RewardSection(Section):
    """One reward: a registered name or a user's function, its weight and its parameters."""

    prefix: ClassVar[str] = "rewards.N."
    name: str = Field(min_length=1, description="a registered reward, module:function or file.py:function")
    weight: float = key(1.0, "weight in the sum")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward")
    timeout_s: float = key(30.0, "own functions: seconds after which a call has failed", gt=0)
    env: list[Annotated[str, AfterValidator(_check_variable)]] = key(
        [], "own functions: environment variables to pass to the worker"
    )


def _read_report_to(value: Any) -> Any:
    """TRL's forms ('none', a name or a list) as a list."""
    if value in (None, "none", ["none"]):
        return []
    return [value] if isinstance(value, str) else value


class RLOOSection(Section):
    """The loop, passed to `RLOOConfig` under the same names: TRL's, plus the kit's own."""

    prefix: ClassVar[str] = "rloo."
    all_are_arguments: ClassVar[bool] = True
    max_steps: Count | None = key(
        None, "optimizer steps; wins over num_train_epochs", trl=TrlDefault(-1, "null means not set in a file"),
        resume="may grow",
    )  # fmt: skip
    num_train_epochs: float | None = key(
        None, "passes over the prompts, when max_steps is null", gt=0,
        trl=TrlDefault(3.0, "a file states how long it trains"), resume="may grow",
    )  # fmt: skip
    learning_rate: float = key(
        LORA_LEARNING_RATE, "peak learning rate", ge=0, follows=f"{FULL_LEARNING_RATE:g} with model.lora: null",
        trl=TrlDefault(1e-6, "TRL's is for full fine-tuning; an adapter needs at least ten times as much"),
    )  # fmt: skip
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] = key(
        "linear", "learning rate over the run"
    )
    warmup_steps: float = key(0, "optimizer steps of warm-up; below 1, a share of the run", ge=0)
    weight_decay: float = key(0.0, "decoupled weight decay", ge=0)
    max_grad_norm: float = key(1.0, "gradients are clipped to this norm; 0 turns clipping off", ge=0)
    optim: Literal[
        "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd"
    ] = key("adamw_torch_fused", "optimizer; the 8-bit ones need a GPU")
    per_device_train_batch_size: Count = key(
        GENERATIONS * PROMPTS, "completions of one micro-step", follows=f"{PROMPTS} x num_generations",
        trl=TrlDefault(8, "a step on the completions of one prompt is noise; this is four prompts"),
    )  # fmt: skip
    gradient_accumulation_steps: Count = key(1, "micro-steps of one optimizer step")
    steps_per_generation: Count | None = key(None, "micro-steps fed by one rollout; null: gradient_accumulation_steps")
    memory: Literal["fast", "balanced", "low"] = key(
        "fast",
        "fast keeps each group's graph; balanced computes log-probs first; low also trains one sequence at a time",
        resume="free",
    )  # fmt: skip
    tokens_per_pass: Count | None = key(
        None, "tokens of one forward and backward pass; null: by the machine", resume="free"
    )
    num_generations: int = key(
        GENERATIONS, "completions per prompt, K", ge=2, lt=2**31,
        trl=TrlDefault(2, "with one sibling most groups tie, and its reward is a noisy baseline"),
    )  # fmt: skip
    num_iterations: Count = key(1, "times each rollout is used; above 1 the ratio is clipped")
    beta: float = key(
        0.0, "KL coefficient; 0 needs no reference model", ge=0,
        trl=TrlDefault(0.05, "the penalty rewards shorter thinking, and the reference costs a pass"),
    )  # fmt: skip
    kl_form: Literal["sum", "length_normalized", "per_token"] = key(
        "length_normalized", "KL in the reward: the completion's sum, its mean per token, or token by token",
        trl=TrlDefault("sum", "the sum grows with length: with beta above 0, short thoughts win"),
    )  # fmt: skip
    reference: Literal["start", "base"] = key("start", "KL against the start of training or the base model")
    ratio_form: Literal["sum", "length_normalized", "per_token"] | None = key(
        None,
        "importance ratio of a completion, its mean over tokens (GSPO), or per token; null: as kl_form and "
        "token_mean need",
    )
    token_mean: Literal["none", "completion", "batch"] = key(
        "none", "mean of the token losses over the completion (GRPO) or the step (DAPO); none: their sum"
    )
    epsilon: float = key(0.2, "lower clip of the ratio: 1 - epsilon", gt=0, lt=1)
    epsilon_high: float | None = key(None, "upper clip: 1 + epsilon_high; null: epsilon", gt=0)
    baseline: Literal["leave_one_out", "group_mean", "none"] = key(
        "leave_one_out", "what a reward is compared with: siblings, whole group, nothing"
    )
    scale_rewards: Literal["none", "group"] = key(
        "none", "group: divide advantages by the group's standard deviation (GRPO)"
    )
    sampler_correction: Literal["auto", "none", "sequence", "token", "sequence_mask", "token_mask"] = key(
        "auto", "weight completions or tokens by trainer / sampler probability, truncated at 2 (_mask: 0 above it); "
        "auto: token if vLLM samples or a filter is accepted, else none",
    )  # fmt: skip
    temperature: float = key(1.0, "temperature of sampling and scoring", gt=0)
    accept_truncated_sampling: bool = key(
        False, "allow the two filters below; their bias is partly corrected and logged"
    )
    top_p: float = key(1.0, "1, unless accept_truncated_sampling", gt=0, le=1)
    top_k: int = key(0, "0, unless accept_truncated_sampling", ge=0)
    max_completion_length: Count = key(
        1536, "tokens of a completion, thinking included", follows="what the prompt leaves of model.max_seq_length",
        trl=TrlDefault(512, "truncated thoughts all get the same reward"),
    )  # fmt: skip
    thinking_budget: Count | None = key(
        None, "tokens after which thinking is closed by force; null: never",
        follows="for a Thinking model, the completion minus the answer: answer_budget, else a quarter, at most 512",
    )  # fmt: skip
    answer_budget: Count | None = key(None, "tokens for the answer after a forced close; null: the rest")
    thinking_close: Literal["tag", "sentence"] = key(
        "tag", "what closes it: </think> alone, or a sentence and </think>"
    )
    tools: list[str] = key([], "functions the model may call: module:function or path/to/file.py:function")
    environment: Named | None = key(
        None, "module:Class with reset(**row), whose public methods are tools; or verifiers/NAME"
    )
    max_turns: Count = key(8, "with tools: turns of the model in one completion, and calls")
    tool_timeout_s: float = key(10.0, "seconds after which a call has failed and its process is ended", gt=0)
    tool_result_tokens: Count = key(256, "tokens of one result; a longer one is cut")
    tool_processes: Count = key(1, "processes for the tools; several let slow calls run at the same time")
    tool_env: list[Annotated[str, AfterValidator(_check_variable)]] = key(
        [], "environment variables to pass to the tools"
    )
    mask_truncated_completions: bool = key(False, "leave truncated completions out of the loss")
    missing_eos_penalty: float | None = key(None, "subtracted from a truncated completion's reward", gt=0)
    reward_clip_range: tuple[float, float] | None = key(None, "[lowest, highest]: clip the summed reward")
    normalize_rewards: bool = key(False, "rewards to mean 0 and deviation 1 over their rollout")
    normalize_advantages: bool = key(False, "advantages to mean 0 and deviation 1 over the generation batch")
    save_steps: Count = key(500, "optimizer steps between checkpoints", resume="free")
    save_total_limit: Count | None = key(
        3, "newest checkpoints to keep; null keeps all",
        trl=TrlDefault(None, "one every 15 minutes would fill the disk overnight"), resume="free",
    )  # fmt: skip
    report_to: Annotated[list[Tracker], BeforeValidator(_read_report_to)] = key(
        [], "trackers in addition to metrics.jsonl, such as tensorboard, trackio, wandb",
        trl=TrlDefault("none", "a list, so that you add a tracker by adding an item"), resume="free",
    )  # fmt: skip

    @property
    def generation_batch_size(self) -> int:
        """Completions of one rollout over all processes."""
        passes = self.steps_per_generation or self.gradient_accumulation_steps
        return self.per_device_train_batch_size * count_processes() * passes

    @property
    def has_tools(self) -> bool:
        """Whether completions may have several turns."""
        return bool(self.tools) or self.environment is not None

    @property
    def prompts_per_generation(self) -> int:
        """Prompts of one rollout over all processes."""
        return self.generation_batch_size // self.num_generations

    def to_arguments(self) -> dict[str, Any]:
        """Like every section's; an empty `report_to` is "none" in TRL."""
        return super().to_arguments() | {"report_to": self.report_to or "none"}

    @model_validator(mode="after")
    def _check_consistency(self) -> "RLOOSection":
        if self.max_steps is None and self.num_train_epochs is None:
            raise ValueError("the length of training is not set; set rloo.max_steps or rloo.num_train_epochs")
        if self.reward_clip_range is not None and self.reward_clip_range[0] >= self.reward_clip_range[1]:
            low, high = self.reward_clip_range
            raise ValueError(f"reward_clip_range is [{low}, {high}]; the first number must be below the second")
        if problems := find_batch_problems(dict(self)) or find_tool_problems(dict(self)):
            raise ValueError("\n".join(problems))
        return self


class HealthSection(Section):
    """What the run does when a health rule (`health/rules.py`) finds something: it warns, unless listed here."""

    prefix: ClassVar[str] = "health."
    stop: list[HealthRule] = key([], "rules whose finding saves and stops the run")
    off: list[HealthRule] = key([], "rules that are not applied")


class VllmSection(Section):
    """vLLM in the trainer's process (`rollout.engine: vllm`); the memory plan fills in nulls."""

    prefix: ClassVar[str] = "rollout.vllm."
    gpu_memory_utilization: float | None = key(
        None, "share of GPU memory for vLLM while it samples, weights included; null: by the memory plan", gt=0, lt=1
    )
    float8_kv_cache: bool = key(False, "8-bit KV cache; compute capability 8.0 or later")
    enforce_eager: bool = key(False, "no CUDA graphs: slower, and about a GiB less")


class RolloutSection(Section):
    """How completions are sampled, and which prompts they are spent on."""

    prefix: ClassVar[str] = "rollout."
    engine: Literal["auto", "native", "generate", "vllm", "server"] = key(
        "auto", "auto: the fastest that backend and machine support", argument="rollout_engine",
        resume="free",
    )  # fmt: skip
    rows: Count | None = key(
        None, "completions generated at once; null: set by the memory plan", argument="rollout_rows", resume="free"
    )
    server_url: str | None = key(
        None, "engine: server: http://host:port of vLLM", argument="rollout_server_url", resume="free"
    )
    server_adapters: str | None = key(
        None, "engine: server: folder that both see; null: one in the run's folder",
        argument="rollout_server_adapters", resume="free",
    )  # fmt: skip
    vllm: VllmSection = Field(default_factory=VllmSection, description="vLLM in the trainer's process")
    resample_rounds: int = key(
        0, "rounds in which groups without signal get fresh prompts", ge=0,
        argument="resample_rounds",
    )  # fmt: skip
    difficulty_samples: int = key(0, "completions per prompt to measure its pass rate before training; 0: none", ge=0)
    min_pass_rate: Share = key(0.0, "skip prompts with a pass rate of at most this")
    max_pass_rate: Share = key(1.0, "skip prompts with a pass rate of at least this")

    @model_validator(mode="after")
    def _check_consistency(self) -> "RolloutSection":
        if self.min_pass_rate >= self.max_pass_rate:
            rates = f"min_pass_rate ({self.min_pass_rate}) is not below max_pass_rate ({self.max_pass_rate})"
            raise ValueError(f"{rates}, so every prompt would be skipped; lower rollout.min_pass_rate")
        if self.difficulty_samples == 0 and (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0):
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) and max_pass_rate ({self.max_pass_rate}) select prompts by a "
                "pass rate that is not measured; set rollout.difficulty_samples=8"
            )
        return self


class JudgeSection(Section):
    """A judge that compares the held-out answers with others: their win rate."""

    prefix: ClassVar[str] = "eval.judge."
    against: str = key("base", "base: the policy before training; or a column with reference answers", min_length=1)
    params: dict[str, Any] = Field(
        description="as of judge_reward: url, model, rubric and others, without mode and scale"
    )


class EvalSection(Section):
    """What is measured on the held-out prompts."""

    prefix: ClassVar[str] = "eval."
    num_prompts: Count | None = key(None, "held-out prompts; null: all")
    num_samples: Count = key(1, "completions per prompt")
    temperature: float = key(1.0, "sampling temperature; 0 is greedy", ge=0)
    greedy: bool = key(True, "also measure greedy accuracy")
    pass_at_k: list[Count] = key([], "report pass@k for these k")
    max_completion_length: Count | None = key(None, "null: rloo.max_completion_length")
    batch_size: Count = key(128, "completions generated at once")
    thinking_budgets: list[Count] = key(
        [], "also measure accuracy with thinking closed after these tokens, and rloo.answer_budget (else 32) after it"
    )
    every_steps: int = key(
        0, "steps between evaluations during training, whose best weights are kept as adapter/; 0: none", ge=0
    )
    every_prompts: Count = key(64, "prompts of an evaluation during training, the same each time")
    judge: JudgeSection | None = key(None, "measure the win rate, before and after training; see below")
    measure: str = key(
        "auto", "what selects the best: accuracy, reward (the weighted sum) or a reward's name; auto: accuracy if a "
        "reward compares answers, else reward",
        min_length=1,
    )  # fmt: skip
    patience: Count | None = key(None, "stop after so many evaluations in a row without a new best; null: never")

    @model_validator(mode="after")
    def _check_consistency(self) -> "EvalSection":
        if self.patience is not None and not self.every_steps:
            raise ValueError(f"patience is {self.patience}, but eval.every_steps is 0; raise it, or eval.patience=null")
        if self.pass_at_k and max(self.pass_at_k) > self.num_samples:
            raise ValueError(
                f"pass_at_k asks for {max(self.pass_at_k)} completions of a prompt, num_samples gives "
                f"{self.num_samples}; set eval.num_samples={max(self.pass_at_k)}"
            )
        return self

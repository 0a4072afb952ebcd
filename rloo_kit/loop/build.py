"""Assembles a trainer's step from its arguments, its model and its backend."""

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import trl
from trl.trainer.utils import disable_dropout_in_model

from rloo_kit._stack import load_stack
from rloo_kit.completion import Tools
from rloo_kit.config.checks import find_prompt_problem
from rloo_kit.data.sources import IMAGE_COLUMNS
from rloo_kit.errors import ConfigError
from rloo_kit.gradient.advantages import AdvantageSettings
from rloo_kit.gradient.objective import Objective, choose_ratio_form
from rloo_kit.gradient.scorer import PolicyScorer, Scorer
from rloo_kit.loop.collaborators import FailureCount, PromptReservoir, Rewarder, Sampler
from rloo_kit.loop.metrics import Recorder
from rloo_kit.loop.options import name_settings
from rloo_kit.loop.step import RLOOStep, StepSettings
from rloo_kit.models.adapters import find_handover_problem, write_adapter
from rloo_kit.models.parallel import Parallel
from rloo_kit.rollout.choice import build_engine
from rloo_kit.rollout.engine import Engine
from rloo_kit.rollout.thinking_budget import limits_of
from rloo_kit.rollout.types import FOREIGN, Filters
from rloo_kit.seams import part
from rloo_kit.sizes import TOKENS_PER_PASS
from rloo_kit.think_tags import ThinkTags

PROMPT_TOKENS = 2048  # room for the prompt in vLLM, unless vllm_max_model_length says otherwise

# Methods of TRL that the step stands in for: a subclass's override of them is not called.
BYPASSED = (
    "_generate_and_score_completions", "_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies",
)  # fmt: skip

Settings = TypeVar("Settings")


def build_step(trainer: trl.RLOOTrainer, tags: ThinkTags, toolbox: Tools | None = None) -> RLOOStep:
    """The step of a trainer that TRL has built; raises ConfigError or BackendError for options that cannot work."""
    args, tokenizer, parallel = trainer.args, trainer._tokenizer, Parallel(trainer.accelerator)
    limits = limits_of(args, tokenizer, tags)
    tools = None
    if toolbox is not None:
        options, name = trainer.chat_template_kwargs or {}, trainer.model.config.name_or_path
        tools = part("episodes").make_tool_use(toolbox, tokenizer, args, name, **options)
        trainer.chat_template_kwargs = {**options, "tools": toolbox.schemas}  # for prompts that TRL renders
    sampler = Sampler(trainer, _build_engine(trainer), limits, parallel, tools)
    settings = choose_settings(trainer, sampler.engine)
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            disable_dropout(model)  # with dropout, the ratio would compare two random parts of the policy
            if hasattr(tokenizer, "vision"):
                _check_images(trainer, parallel)
                bare = trainer.accelerator.unwrap_model(model)
                part("images").attach(bare, tokenizer, tokenizer.vision, freezes=model is trainer.ref_model)
    scorer = PolicyScorer(
        trainer.accelerator.unwrap_model(trainer.model),
        Scorer(trainer.model, trainer.temperature, tokenizer.pad_token_id),
        parallel,
        beta=trainer.beta,
        reference=args.reference,
        reference_model=trainer.ref_model,
        checkpointing=args.gradient_checkpointing_kwargs,
    )
    has_budget = args.thinking_budget is not None
    return RLOOStep(
        settings,
        sampler,
        Rewarder(trainer, parallel, has_budget, toolbox=toolbox),
        scorer,
        Recorder(trainer, parallel, tags, settings.advantage, has_budget),
        parallel,
        FailureCount(),
        PromptReservoir(trainer.train_dataset, args.seed) if settings.resample_rounds else None,
    )


def _check_images(trainer: trl.RLOOTrainer, parallel: Parallel) -> None:
    """Raise ConfigError for what a vision model does not train with."""
    if parallel.kind == "shards":  # a tower's layers are gathered by all processes, which encode different images
        raise ConfigError("a vision model cannot be sharded: use the launch file configs/accelerate/ddp.yaml")
    if trainer.args.resample_rounds and set(IMAGE_COLUMNS) & set(trainer.train_dataset.column_names):
        raise ConfigError("resample_rounds does not work with columns of images: set it to 0, or use kit.train")


def describe(trainer: Any) -> str:
    """One line each for the engine, the scoring, the memory mode, the processes, and warnings."""
    step: RLOOStep = trainer.rloo
    engine, settings = step.sampler.engine, step.settings
    memory = settings.memory
    if memory == "fast" and settings.advantage.beta and settings.scores_first is not None:
        memory = f"fast, which falls back to balanced: {settings.scores_first}"
    lines = [f"rollout: {engine.name}, {engine.reason}", f"scoring: {step.scorer.scorer.reason}", f"memory: {memory}"]
    if settings.filters.active:
        lines.append(f"truncated sampling: {settings.filters}; sampler_correction {settings.sampler_correction}")
    if step.parallel.kind != "single":
        lines.append(f"processes: {step.parallel.describe()}")
    lines += [
        f"WARNING: {type(trainer).__name__}.{name} is not called in training here: override _generate_single_turn "
        "(what samples) or _compute_loss (what is trained)"
        for name in BYPASSED
        if getattr(type(trainer), name) is not getattr(trl.RLOOTrainer, name)
    ]
    if trainer.args.learning_rate == 0:
        lines.append("WARNING: learning_rate is 0, so no weight will move")
    return "\n".join(lines)


def check_prompts(trainer: trl.RLOOTrainer, prompts: int) -> None:
    """Raise ConfigError if the training set does not fill one rollout."""
    if problem := find_prompt_problem(prompts, vars(trainer.args)):
        raise ConfigError(problem)


def refuse_idle(trainer: Any) -> None:
    """Raise ConfigError if training would change nothing."""
    trained = {id(parameter) for parameter in trainer.model.parameters() if parameter.requires_grad}
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    problem = ""
    if not trained:
        problem = "no parameter requires a gradient: load an adapter with is_trainable=True"
    elif trainer.rloo.parallel.kind != "shards" and not trained & held:
        problem = "the optimizer has none of the trained parameters: leave optimizers out"
    elif trainer.state.max_steps <= 0:
        problem = "there is no step to take: raise max_steps or num_train_epochs"
    if problem:
        raise ConfigError(f"nothing would be trained, because {problem}")


def choose_settings(trainer: trl.RLOOTrainer, engine: Engine) -> StepSettings:
    """The step's settings from the trainer's arguments, and what follows from them."""
    args, filters = trainer.args, read_filters(trainer.args)
    on_policy = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
    is_cpu = trainer.accelerator.device.type == "cpu"
    advantage = _read(AdvantageSettings, args)
    ratio_form = choose_ratio_form(args.ratio_form, advantage.kl_form, args.token_mean)
    bounds = {"epsilon_low": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high}
    config = trainer.model.config.get_text_config()  # of a mixture's dense sibling too (Granite, Jamba): no routers
    experts = [getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    is_dense = max([count for count in experts if isinstance(count, int)], default=2) < 2
    correction = args.sampler_correction
    if correction == "auto":  # another program samples, or from a truncated distribution
        correction = "token" if engine.name in FOREIGN or filters.active else "none"
    return _read(
        StepSettings,
        args,
        num_generations_eval=trainer.num_generations_eval,
        on_policy=on_policy,
        filters=filters,
        scores_first=_why_scores_first(trainer, on_policy),
        advantage=advantage,
        sampler_correction=correction,
        objective=_read(Objective, args, ratio_form=ratio_form, **bounds),
        tokens_per_pass=args.tokens_per_pass or TOKENS_PER_PASS[is_cpu],
        aux_loss_coef=trainer.router_aux_loss_coef if trainer.aux_loss_enabled and not is_dense else 0.0,
    )


def _read(settings: type[Settings], args: Any, **chosen: Any) -> Settings:
    """A dataclass of options, each read from the arguments under its field's name, except those in `chosen`."""
    names = [field.name for field in fields(settings) if field.name not in chosen]  # type: ignore[arg-type]
    return settings(**{name: getattr(args, name) for name in names}, **chosen)


def read_filters(args: Any) -> Filters:
    """The sampling filters of an `RLOOConfig`; -1 and None mean none, as in vLLM and TRL."""
    return Filters(1.0 if args.top_p is None else args.top_p, max(args.top_k or 0, 0))


def _why_scores_first(trainer: trl.RLOOTrainer, on_policy: bool) -> str | None:
    """Why advantages cannot be computed in the pass that scores the policy; None if they can."""
    if not on_policy:
        return "the step is off-policy, so log-probabilities of the rollout are needed first"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of the experts is computed per micro-step, which may split a group"
    if trainer.normalize_advantages:
        return "normalize_advantages needs the advantages of the whole rollout first"
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if rows % trainer.num_generations:
        return f"a process has {rows} completions, which do not divide into groups of {trainer.num_generations}"
    return None if trainer.args.memory == "fast" else f"rloo.memory is {trainer.args.memory}"


def _build_engine(trainer: trl.RLOOTrainer) -> Engine:
    args, wanted, vllm = trainer.args, trainer.args.rollout_engine, None
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.use_transformers_continuous_batching:
        raise ConfigError(
            "use_transformers_continuous_batching is set, but the kit samples with its own engines: leave it out "
            "and set rollout_engine=auto"
        )
    if wanted == "vllm":  # to start it with, if the model was not loaded with it
        longest = args.vllm_max_model_length or trainer.max_completion_length + PROMPT_TOKENS
        vllm = part("vllm").VllmSettings(
            max_tokens=min(longest, model.config.get_text_config().max_position_embeddings),
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            four_bit=getattr(trainer.model, "is_loaded_in_4bit", False),
        )
    return build_engine(
        model,
        wanted,
        backend="transformers" if load_stack().unsloth is None else "unsloth",
        temperature=trainer.temperature,
        end_ids=list(trainer.eos_token_ids),
        pad_id=trainer._tokenizer.pad_token_id,
        rows=args.rollout_rows,
        server=_server_of_trainer(trainer) if wanted == "server" else None,
        vllm=vllm,
        filters=read_filters(args),
        say=lambda line: print(name_settings(line, args)),
    )


def _server_of_trainer(trainer: trl.RLOOTrainer) -> Any:
    """Where the engine "server" samples, and how the policy's adapter gets there."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    if problem := find_handover_problem(model):
        raise ConfigError(problem)
    folder = Path(args.rollout_server_adapters or f"{args.output_dir}/server_adapters")

    def hand_over(target: Path) -> None:
        write_adapter(trainer.accelerator, trainer.model_wrapped, target)

    vocabulary = model.config.get_text_config().vocab_size
    return part("engines").ServerSettings(args.rollout_server_url, folder, hand_over, vocabulary)


def disable_dropout(model: torch.nn.Module) -> None:
    """Turn dropout off. TRL's covers torch's modules; most attentions keep a number."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name.endswith(("dropout", "pdrop", "layerdrop")) and isinstance(value, float):
                setattr(module, name, 0.0)

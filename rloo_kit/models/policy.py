"""The policy: a model with its tokenizer, loaded by one of two backends, Unsloth or transformers + PEFT."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rloo_kit._stack import load_stack
from rloo_kit.collective import main_first, start_processes
from rloo_kit.config.run import RunConfig
from rloo_kit.config.schema import RolloutSection
from rloo_kit.data.chat import resolve_family
from rloo_kit.errors import BackendError, ConfigError, RlooKitError, RunNotFoundError
from rloo_kit.models.adapters import ADAPTER_ALONE, find_bare_layers, follow_umask
from rloo_kit.models.backends import find_vllm, load_backend
from rloo_kit.models.parallel import Sharding
from rloo_kit.models.source import bind_padding, check_base, check_config, digest_source, dtype_name, find_source
from rloo_kit.runs.files import read_object, saving, write_json
from rloo_kit.runs.find import ADAPTER_CONFIG, MODEL_CONFIG, RUN_FILE, TRAINED, is_export, origin_of, weights_of
from rloo_kit.runs.folder import BASE
from rloo_kit.seams import part
from rloo_kit.system import environment
from rloo_kit.system.input_files import from_here
from rloo_kit.system.memory import return_large_blocks
from rloo_kit.system.processes import is_distributed, is_main_process, say
from rloo_kit.think_tags import ThinkTags, bind_think_tags

# Parameters up to which a CPU uses one thread: a second mostly waits for matrices as small as the embedded model's
# (measured: one thread is 20 % faster on two idle cores, seven times as fast on busy ones).
SMALL_MODEL = 2_000_000
_loaded: set[str] = set()


@dataclass
class Policy:
    """A model to train and sample from.

    Attributes:
        model: a PeftModel, or the plain causal language model if every parameter is trained.
        tokenizer: pads on the left, has a pad token.
        backend: "unsloth" or "transformers". reason: why that one, in readable text.
        tags: ids of `<think>` and `</think>`.
        family: "thinking", "hybrid", "instruct" or "plain".
        config_arguments: keywords that `RLOOConfig` needs for this model (gradient checkpointing).
        rollout: `run.rollout` of the run that it was loaded for; None if it was built by hand.
        sharding: gathers whole weights after training with FSDP; None if each process has them.
        trained: optimizer steps that it has had since it was loaded: of "RLOO" (`train`), of "SFT" (`fine_tune`).
        weights: digests of the files that it was loaded from, by their name in words; see `digest_source`.
        precision: of the autocast in training, and when completions are sampled: "bf16", "fp16" or "no".
    """

    model: Any
    tokenizer: Any
    backend: str
    reason: str
    tags: ThinkTags
    family: str
    config_arguments: dict[str, Any]
    rollout: RolloutSection | None = None
    sharding: Sharding | None = None
    trained: dict[str, int] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    precision: str = "no"

    def whole_weights(self) -> AbstractContextManager[Any]:
        """A block in which this process has all weights and may sample without the others; all enter it together."""
        return nullcontext() if self.sharding is None else self.sharding.whole_weights()

    def refuse_trained(self, so: str, *methods: str) -> None:
        """Raise ConfigError, with the consequence `so`, if it has had steps of one of the methods."""
        if found := [f"{steps} steps of {name}" for name, steps in self.trained.items() if name in methods and steps]:
            raise ConfigError(
                f"this policy has had {' and '.join(found)} since it was loaded, so {so}: load it again with "
                "policy = kit.load_policy(run), and run what follows"
            )

    def inference_mode(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients, for generation; the previous mode is restored afterwards."""
        return load_backend(self.backend).inference_mode(self.model)

    def autocast(self) -> AbstractContextManager[Any]:
        """A block that computes in the precision of training, as accelerate does there."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.model.device.type, dtype)

    def describe(self) -> str:
        """One line: model, size, trained parameters, device, backend and why it was chosen."""
        parameters = list(self.model.parameters())
        total = sum(value.numel() * (2 if type(value).__name__ == "Params4bit" else 1) for value in parameters)
        trained = sum(value.numel() for value in parameters if value.requires_grad)
        base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        bare = find_bare_layers(self.model) if hasattr(self.model, "peft_config") else []
        without = f" (no adapter on {', '.join(bare)})" if bare else ""
        bits = " in 4-bit" if getattr(base, "is_loaded_in_4bit", False) else ""
        return (
            f"{type(base).__name__}{bits}, {total / 1e6:.2f} M parameters, {trained / 1e6:.2f} M trained{without}, on "
            f"{next(self.model.parameters()).device}, family {self.family}; backend {self.backend}: {self.reason}"
        )


def load_policy(run: RunConfig) -> Policy:
    """Load the model of `run.model` with an adapter to train, and its tokenizer. `check` finds what is wrong before.

    Args:
        run: a `RunConfig`. `run.model.backend` forces a backend; an existing adapter (`run.model.adapter`, or a
            `run.model.name` that is an adapter's folder) is continued.

    Raises:
        BackendError: the model, its adapter or the backend cannot be used; the message names the key to change.
    """
    stack = load_stack()
    start_processes()
    name, reason = _choose(run, stack)
    with main_first():
        source = find_source(run)
    vllm = _plan_vllm(run, name)
    if not torch.cuda.is_available():
        return_large_blocks()
    try:
        config = stack.transformers.AutoConfig.from_pretrained(source.base)
        check_config(run, config, name)
        model, tokenizer = load_backend(name).load(run, source, config, vllm)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, RlooKitError):
            raise
        without = "" if vllm is None else " (with vLLM; rollout.engine=generate loads it without)"
        raise BackendError(f"cannot load model.name = {run.model.name}{without}: {error}") from error
    if vllm is not None:
        _announce(vllm, model)
    _loaded.add(name)
    if source.adapter is not None and not source.is_folder:
        check_base(source)  # again: the hub's files may have been missing before
    bind_padding(model, tokenizer)
    is_small = run.model.is_embedded or sum(value.numel() for value in model.parameters()) < SMALL_MODEL
    if is_small and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        backend=name,
        reason=reason,
        tags=bind_think_tags(tokenizer),
        family=resolve_family(tokenizer, run.model.name, run.model.family, run.model.enable_thinking),
        config_arguments=load_backend(name).config_arguments(run),
        rollout=run.rollout,
        weights=digest_source(source),
        precision=environment.mixed_precision(run.model.dtype),
    )


def start_engine(run: RunConfig, policy: Policy) -> None:
    """Start vLLM if `run.rollout` asks for it and the policy has none; raises BackendError if it cannot start."""
    if run.rollout.engine != "vllm" or find_vllm(policy.model) is not None:
        return
    vllm = _plan_vllm(run, policy.backend)
    assert vllm is not None  # if the run asks for vLLM, `_plan_vllm` raises instead
    load_backend(policy.backend).start_engine(run, policy.model, vllm)
    _announce(vllm, policy.model)


def save_adapter(policy: Policy, folder: str | Path, **record: Any) -> Path:
    """Write what was trained (the adapter, or the whole model if there is none), the tokenizer, and in
    `trained.json` the digest of the base's weights and `record`, into `folder`.

    With several processes, all call it and the main one writes.

    Returns:
        the folder; a run with it as `model.adapter` or `model.name` trains it further.
    """
    folder = Path(folder)
    weights = {} if policy.sharding is None else {"state_dict": policy.sharding.state_dict()}
    if not is_main_process():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with saving(folder):
        if hasattr(policy.model, "peft_config"):
            policy.model.save_pretrained(str(folder), **ADAPTER_ALONE, **weights)
        else:
            policy.model.save_pretrained(str(folder), **weights)
        policy.tokenizer.padding_side = "left"
        policy.tokenizer.save_pretrained(str(folder))
        follow_umask(folder)
        write_json(folder / TRAINED, {"base": policy.weights.get(BASE)} | record)
    return folder


def _choose(run: RunConfig, stack: Any) -> tuple[str, str]:
    """The backend's name, and why it was chosen."""
    wanted = run.model.backend
    if is_distributed():
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and run.model.load_in_4bit:
            raise BackendError(
                "model.load_in_4bit is true, but FSDP cannot shard 4-bit weights: use the launch file "
                "configs/accelerate/ddp.yaml, or set model.load_in_4bit=false"
            )
        if wanted == "unsloth" or stack.unsloth is not None:
            asked = "model.backend is unsloth" if wanted == "unsloth" else "Unsloth is imported in this process"
            raise BackendError(
                f"{asked}, but the run has {environment.many_processes()}: set model.backend=transformers, which "
                "trains on all of them, or start one process"
            )
        return "transformers", environment.many_processes()
    obstacle = load_backend("unsloth").unusable(run, stack)
    if wanted == "unsloth":
        if obstacle:
            raise BackendError(f"model.backend is unsloth, but {obstacle}; or set model.backend=transformers")
        return "unsloth", "model.backend asks for it"
    if wanted == "auto" and not obstacle:
        return "unsloth", environment.current().backend_reason
    if "unsloth" in _loaded:
        raise BackendError(
            "a model was loaded through Unsloth in this process, which replaces parts of transformers and PEFT for "
            "good, so the transformers backend would run them too: start a new process (restart the kernel) for "
            "model.backend=transformers"
        )
    return "transformers", "model.backend asks for it" if wanted == "transformers" else str(obstacle).partition(";")[0]


def _plan_vllm(run: RunConfig, backend: str) -> Any:
    """How vLLM shares the GPU with training, a `VllmPlan`; None if it does not sample (`rloo-kit plan` says why)."""
    asked = run.rollout.engine == "vllm"
    if not asked and (run.rollout.engine != "auto" or not torch.cuda.is_available()):
        return None
    try:
        choice, plan = part("plan").plan_engine(run), part("plan").plan_vllm(run)
    except ConfigError as error:  # a model whose memory cannot be computed
        if asked:
            raise BackendError(f"rollout.engine is vllm, but its memory cannot be planned: {error}") from error
        return None
    if choice.name != "vllm":
        return None
    obstacle = plan.obstacle or (load_backend("unsloth").find_sleep_problem() if backend == "unsloth" else None)
    if obstacle and asked:
        raise BackendError(f"rollout.engine is vllm, but {obstacle}; or set rollout.engine=auto")
    if obstacle:
        say(f"rollout: not vLLM: {obstacle}")
        return None
    return plan


def _announce(plan: Any, model: Any) -> None:
    """Print one line: which vLLM samples, and its planned memory."""
    share = f"{plan.gpu_memory_utilization:.2f} of the GPU, {plan.pool_gib:.2f} GiB for keys and values"
    print(f"vLLM: {find_vllm(model)}{f'; {share}' if model.device.type == 'cuda' else ''}", flush=True)


def trained_run(source: str | Path, *overrides: str) -> RunConfig:
    """The configuration for `load_policy` to load what a run has trained: its `adapter/` on its base.

    Args:
        source: the run's folder, or its YAML file; or a folder of weights, see `origin_of`.
        overrides: KEY=VALUE, for example `rollout.engine=native`.

    Raises:
        RunNotFoundError: no such run, or it has not saved an adapter yet.
        ConfigError: as `load_config`, `weights_of` and `origin_of` raise it.
    """
    source = from_here(source)
    run = origin_of(source, *overrides)
    saved = source if is_export(source) else run.folder / "adapter"
    if not saved.is_dir():
        raise RunNotFoundError(
            f"{run.folder} has no adapter/, so nothing is trained there yet: run rloo-kit train {source}"
        )
    key, weights = weights_of(source if is_export(source) else run.folder)
    changed: dict[str, Any] = {"adapter": None, "name": run.model.name}
    named = Path(run.model.name).expanduser()
    if (named / ADAPTER_CONFIG).is_file() and named.resolve() != saved.resolve():
        changed["name"] = find_source(run).base  # the run continued another adapter, which is part of this one
    is_quantised = read_object(weights / MODEL_CONFIG).get("quantization_config") is not None  # loads with an adapter
    if key == "name" and run.model.lora is not None and not is_quantised:
        # merged: it has no separate base, and it is no longer in 4-bit
        backend = "auto" if run.model.backend == "unsloth" else run.model.backend  # Unsloth's loader needs an adapter
        changed |= {"lora": None, "load_in_4bit": False, "dtype": dtype_name(run), "backend": backend}
    run.model = run.model.model_copy(update=changed | {key: str(weights)})
    return run


def load_trained(source: str | Path, *overrides: str) -> tuple[RunConfig, Policy]:
    """`trained_run` and its policy; raises what `trained_run` and `load_policy` raise."""
    run = trained_run(source, *overrides)
    return run, load_policy(run)


def load_base(source: str | Path, *overrides: str) -> Policy | None:
    """The model that a run started from, if the run's result has all weights; None if the result is an adapter, since
    the policy of `load_trained` with its adapter disabled is the base. Arguments and errors are those of
    `load_trained`.

    Raises:
        ConfigError: a merged model that does not record its base.
    """
    trained = trained_run(source, *overrides)
    if trained.model.adapter is not None:
        return None
    run = origin_of(source, *overrides)
    if Path(run.model.name).resolve() == Path(trained.model.name).resolve():
        raise ConfigError(
            f"{source} has whole weights and does not record their base (no {RUN_FILE} that names it): ask the base "
            "directly, rloo-kit ask FOLDER"
        )
    return load_policy(run)

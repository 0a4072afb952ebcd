"""What `RLOOTrainer` is made of: its typed parts, how they are chosen when it is built, and its checkpoints.

Shapes: B completions of this process, P prompt, C completion tokens, N completion tokens laid end to end.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import disable_dropout_in_model, use_adapter

from rloo_kit._stack import load_stack
from rloo_kit.errors import ConfigError
from rloo_kit.gradient.advantages import RunningMoments
from rloo_kit.gradient.objective import Objective, choose_ratio_form
from rloo_kit.gradient.packing import Group
from rloo_kit.gradient.passes import PassSettings, PolicyPass
from rloo_kit.gradient.scorer import Scorer, Scores
from rloo_kit.gradient.streamed_pass import StreamedPass
from rloo_kit.loop.options import RLOOConfig
from rloo_kit.loop.resample import PromptReservoir
from rloo_kit.models.adapters import NO_ADAPTER, is_identity, same_as_reference, write_adapter
from rloo_kit.models.parallel import Parallel
from rloo_kit.plan.planner import TOKENS_PER_PASS
from rloo_kit.rollout.engine import build_engine, check_cache
from rloo_kit.rollout.thinking_budget import make_limits
from rloo_kit.rollout.types import Engine, Limits, Rollout
from rloo_kit.runs.files import read_json, saving, write_json
from rloo_kit.runs.watch import FailureWatch, FiniteWatch
from rloo_kit.think_tags import ThinkTags

if TYPE_CHECKING:
    from trl import RLOOTrainer as _StockTrainer  # whose attributes the mixins read, and whose methods they extend

    from rloo_kit.rollout.server import ServerSettings
else:
    _StockTrainer = object

LOOP_STATE = "loop_state.json"  # in a checkpoint


class TrainerParts(_StockTrainer):
    """The attributes that the mixins of `RLOOTrainer` share; those of TRL's trainer come in addition.

    Attributes:
        rollout_listeners: called once a generation batch with one dict for each completion of this process.
        _engine: what samples; None where TRL's code does (vLLM). _rollout: what it returned last.
        _lengths: of completions, by their prompt's hash: what is expected the next time.
        _failed: (A,) bool, samples of the last rollout for which a reward failed.
        _window: the rollout in use. _order: of its rows. _due: rows whose gradient this step still has to make.
        _broken: what was not finite in this step. _may_be_reference: False once the policy has left its reference.
        _episodes, _started_at: completions so far, and since when: the log's `eps`.
    """

    think_tags: ThinkTags
    rollout_listeners: list[Callable[[list[dict[str, Any]]], None]]
    _engine: Engine | None
    _limits: Limits
    _rollout: Rollout | None
    _lengths: dict[int, float]
    _reservoir: PromptReservoir | None
    _train_sampler: Any
    _running: RunningMoments
    _failures: FailureWatch
    _failed: torch.Tensor
    _parallel: Parallel
    _scorer: Scorer
    _ref_scorer: Scorer
    _passes: PolicyPass
    _finite: FiniteWatch
    _may_be_reference: bool
    _window: dict[str, Any] | None
    _order: list[int]
    _due: list[int]
    _broken: str | None
    _episodes: int
    _started_at: float | None

    def _option(self, name: str) -> Any:
        """An option of the kit's config; its default where `args` is TRL's own config."""
        return getattr(self.args, name, RLOOConfig.__dataclass_fields__[name].default)

    @property
    def _on_policy(self) -> bool:
        """Whether every completion is used before the weights that sampled it change."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _local_rows(self, rows: int) -> slice:
        """Where this process's rows lie among those of all, if each has `rows`."""
        first = self.accelerator.process_index * rows
        return slice(first, first + rows)


class TrainerSetup(TrainerParts):
    """Builds engine, scorer and passes, and answers what they need of the trainer."""

    def describe(self) -> str:
        """A line each: what samples, how completions are scored, how the gradient is made, and why; the processes."""
        engine = "vllm, through TRL" if self._engine is None else f"{self._engine.name}, {self._engine.reason}"
        obstacle = self._why_not_open()
        memory = self._option("memory")
        if self.beta and obstacle and memory != "balanced":
            memory = f"{memory}, which falls back to balanced: {obstacle}"
        lines = [f"rollout: {engine}", f"scoring: {self._scorer.reason}", f"memory: {memory}"]
        if self._parallel.kind != "single":
            lines.append(f"processes: {self._parallel.describe()}")
        return "\n".join(lines)

    def _build_passes(self) -> None:
        for model in (self.model, self.ref_model):
            if model is not None:
                disable_dropout(model)  # the ratio compares one policy with itself, not two random parts of it
        pad_id = self._tokenizer.pad_token_id
        self._scorer = Scorer(self.model, self.temperature, pad_id)
        if self.ref_model is not None:
            self._ref_scorer = Scorer(self.ref_model, self.temperature, pad_id, self._scorer.layout)
        kl_form = self._option("kl_form")
        form = choose_ratio_form(self._option("ratio_form"), kl_form)
        settings = PassSettings(
            Objective(self.epsilon_low, self.epsilon_high, self._option("delta"), form),
            num_generations=self.num_generations,
            beta=self.beta,
            kl_form=kl_form,
            baseline=self._option("baseline"),
            memory=self._option("memory"),
            tokens_per_pass=self._option("tokens_per_pass") or self._usual_tokens(),
            sampler_correction=self._option("sampler_correction"),
            sampler_correction_cap=self._option("sampler_correction_cap"),
        )
        make = StreamedPass if settings.memory == "low" else PolicyPass
        equalize = self._parallel.equalize
        self._passes = make(settings, self._score, self._scorer.tokens, self._reference_logps, equalize)

    def _usual_tokens(self) -> int:
        """Tokens of a pass by default: a CPU gains nothing from large ones, its caches are small."""
        return TOKENS_PER_PASS[self.accelerator.device.type == "cpu"]

    def _why_not_open(self) -> str | None:
        """Why advantages cannot wait for the pass that scores the policy; None if they can."""
        if not self._on_policy or self.num_iterations > 1:
            return "the step is off-policy, so log-probabilities of the rollout are needed first"
        if self.normalize_advantages:
            return "normalize_advantages needs the advantages of the whole rollout first"
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        if rows % self.num_generations:
            return f"a process holds {rows} completions, which are no whole groups of {self.num_generations}"
        if self._option("memory") == "low" and self._parallel.kind == "shards":
            return "sharded gradients are added up during the pass"
        return "rloo.memory asks for it" if self._option("memory") == "balanced" else None

    def _build_engine(self) -> None:
        unwrapped = self.accelerator.unwrap_model(self.model)
        self._limits = make_limits(
            self._tokenizer,
            self.think_tags,
            self.max_completion_length,
            self._option("thinking_budget"),
            self._option("answer_budget"),
            self._option("thinking_close"),
        )
        self._engine = None
        wanted = self._option("rollout_engine")
        if self.use_transformers_continuous_batching:
            raise ConfigError(
                "use_transformers_continuous_batching is set, but the kit samples with its own engines: leave it out "
                "and set rollout_engine=auto"
            )
        if self.use_vllm:
            check_cache(self._option("rollout_cache"), "vllm", backend_name(), on_cuda=True)
            self._prepare_vllm()
            return  # TRL's own code syncs the weights
        self._engine = build_engine(
            unwrapped,
            wanted,
            backend=backend_name(),
            temperature=self.temperature,
            end_ids=list(self.eos_token_ids),
            pad_id=self._tokenizer.pad_token_id,
            rows=self._option("rollout_rows"),
            cache=self._option("rollout_cache"),
            server=self._server_settings() if wanted == "server" else None,
        )

    def _server_settings(self) -> "ServerSettings":
        """Where the engine "server" samples, and how the policy's adapter gets there."""
        from rloo_kit.rollout.server import ServerSettings  # loads an HTTP client

        if not is_peft_model(self.accelerator.unwrap_model(self.model)):
            raise ConfigError(NO_ADAPTER)
        folder = self._option("rollout_server_adapters") or f"{self.args.output_dir}/server_adapters"

        def hand_over(target: Path) -> None:
            write_adapter(self.accelerator, self.model_wrapped, target)

        return ServerSettings(self._option("rollout_server_url"), Path(folder), hand_over)

    def _prepare_vllm(self) -> None:
        """Have vLLM return log-probabilities, which TRL's RLOO does not ask for; refuse what TRL's code cannot do."""
        generation: Any = getattr(self, "vllm_generation", None)
        has_logps = hasattr(generation, "logprobs")
        if has_logps:
            generation.logprobs = 0  # of the sampled token alone
        correction, budget = self._option("sampler_correction"), self._limits.thinking_budget
        if budget is not None:
            raise ConfigError(
                f"thinking_budget is {budget}, but completions come from vLLM through TRL here, which cannot close a "
                "thought: set thinking_budget to null"
            )
        if correction != "none" and not has_logps:
            raise ConfigError(
                f"sampler_correction is {correction}, but vLLM through TRL returns no log-probabilities here: set "
                "sampler_correction to none"
            )

    def _build_reservoir(self) -> PromptReservoir | None:
        if not self._option("resample_rounds"):
            return None
        return PromptReservoir(self.train_dataset, self.args.seed)

    def _drop_redundant_reference(self) -> None:
        """TRL copies every adapter as "ref"; one that is the identity, or not wanted, is only memory and time."""
        model = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(model) or "ref" not in model.peft_config:
            return
        if self._option("reference") == "base" or is_identity(model):
            model.delete_adapter("ref")

    def _score(self, model: torch.nn.Module, groups: list[Group], need_entropy: bool = True) -> Scores:
        """Log-probabilities and entropies of the groups' completions under `model`, (N,)."""
        with self.accelerator.autocast():
            return self._scorer.score(model, groups, need_entropy)

    def _reference_logps(self, model: torch.nn.Module, groups: list[Group]) -> torch.Tensor | None:
        """(N,) under the reference, without a graph; None while the policy is its own reference, or without a KL."""
        if self.beta == 0.0 or self._is_reference():
            return None
        kwargs = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), self.accelerator.autocast():
            if self.ref_model is not None:
                return self._ref_scorer.score(self.ref_model, groups, need_entropy=False).logps
            policy = self.accelerator.unwrap_model(self.model)
            with (
                disable_gradient_checkpointing(self.model, kwargs),
                use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None),
            ):
                return self._scorer.score(model, groups, need_entropy=False).logps

    def _is_reference(self) -> bool:
        """Whether the policy's weights are still those of the reference; asked until they have moved once."""
        if self._may_be_reference and self._parallel.kind == "shards":
            self._may_be_reference = False  # no process has the tensors to compare
        if self._may_be_reference:
            self._may_be_reference = self.ref_model is None and same_as_reference(
                self.accelerator.unwrap_model(self.model), self._option("reference")
            )
        return self._may_be_reference

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's interface to the scoring above: (B, P + C) in, log-probabilities and entropies (B, C) out."""
        masks = attention_mask.bool()
        groups = [
            Group(ids[:-logits_to_keep][kept[:-logits_to_keep]], [ids[-logits_to_keep:][kept[-logits_to_keep:]]])
            for ids, kept in zip(input_ids, masks, strict=True)
        ]
        scores = self._score(model, groups, compute_entropy)
        scored = masks[:, -logits_to_keep:]
        empty = torch.zeros(scored.shape, device=input_ids.device)
        entropies = empty.masked_scatter(scored, scores.entropies) if compute_entropy else None
        return empty.masked_scatter(scored, scores.logps), entropies, None


def disable_dropout(model: torch.nn.Module) -> None:
    """TRL's own knows modules only; most attentions keep their share as a number (`attention_dropout`)."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def backend_name() -> str:
    """The backend whose model a trainer of this process gets."""
    return "transformers" if load_stack().unsloth is None else "unsloth"


class TrainerFiles(TrainerParts):
    """Writes and reads the loop's state in checkpoints."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the adapter and its reference as they were.

        transformers loads the adapters in a checkpoint's subfolders or the one above them, not both; and a run that
        is resumed in the process it was cut in has a trained adapter, which TRL has just copied as the reference.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_loop_state(resume_from_checkpoint)
        policy = self.accelerator.unwrap_model(self.model)
        if not is_peft_model(policy):
            return
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            policy.set_adapter("default")
        elif "ref" in policy.peft_config:
            policy.delete_adapter("ref")

    def _load_loop_state(self, folder: str) -> None:
        state = read_json(Path(folder) / LOOP_STATE)
        if state is None:
            return  # written by TRL's trainer, or by the kit before its loop had a state
        self._running = RunningMoments.from_dict(state["rewards"])
        if self._reservoir is not None and state["reservoir"] is not None:
            self._reservoir.load_state_dict(state["reservoir"])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with saving(folder):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                reservoir = None if self._reservoir is None else self._reservoir.state_dict()
                write_json(folder / LOOP_STATE, {"rewards": self._running.to_dict(), "reservoir": reservoir})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's; whoever ends the process waits for it (`rloo_kit.runs.files`)."""
        with saving(output_dir or self.args.output_dir):
            super().save_model(output_dir, _internal_call)

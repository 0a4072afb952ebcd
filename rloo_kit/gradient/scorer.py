"""Log-probabilities of groups of completions, in the smallest layout that the model computes correctly.

A `Scorer` first scores random groups in each layout, in training mode, and uses only the layouts whose values and
gradients agree with single sequences. It does not switch off dropout for real passes.

Shapes: G groups of K_g completions, N completion tokens of all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from rloo_kit.errors import BackendError, ConfigError
from rloo_kit.gradient import packing
from rloo_kit.gradient.logprobs import attach_token_scoring
from rloo_kit.gradient.packing import Group, count_tokens, lay_out, token_weights
from rloo_kit.models.adapters import same_as_reference
from rloo_kit.models.backends import find_other_layers, is_coarse, load_backend, packed_keywords
from rloo_kit.models.parallel import Parallel

LAYOUTS = ("shared", "repeated", "padded")
# P and C_i of the self-check's groups: 1,024 tokens, several blocks of every attention kernel. Without a GPU, 21:
# Triton's interpreter takes 5 s for 16 and 50 s for 157 (two cores, one layer), and no kernel splits rows into blocks.
CHECK_LENGTHS = ((200, (300, 0, 140)), (100, (284,)))
CHECK_LONGEST, CHECK_SHARE_OFF_GPU = 500, 0.0225
CHECK_LOGITS = 16  # tokens whose logits are computed for the whole vocabulary
SHARED_PAYS = 1.3  # Unsloth's own threshold: tokens with repeated prompts over tokens with shared ones
WATCHED, LARGEST_WATCHED = 14, 2**24  # self-check: trained tensors from each end, and maximum elements of each

Checked = tuple[torch.Tensor, list[torch.Tensor]]  # log-probabilities and gradients


@dataclass(frozen=True)
class Tolerance:
    """For log-probabilities, in nats (`mean`, `largest`), and for the gradient, relative to its norm."""

    mean: float
    largest: float
    gradient: float


TOLERANCE, TOLERANCE_16_BITS = Tolerance(1e-3, 1e-3, 1e-3), Tolerance(0.05, 0.5, 0.15)


@dataclass(frozen=True)
class Scores:
    """Scores of the N completion tokens, group by group, completion after completion: nats, float32. Not the model's
    output itself, which would keep 8 % more memory in a step with `memory: low`. Only `logps` carries a gradient;
    `entropies`, and the auxiliary loss of a mixture of experts, are None unless requested.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None = None


class Scorer:
    """Scores completions under one model.

    Args:
        model: a causal language model, bare or wrapped (PEFT, DDP). It is patched to accept scoring calls; any other
            call is unchanged.
        temperature: the logits are divided by it, as in sampling. pad_id: a token id that the model knows.
        layout: "auto" checks and chooses; "shared", "repeated" or "padded" takes that one, unchecked.

    Attributes:
        layouts: those that may be used. layout: the one in use. reason: one line, why these.

    Raises:
        BackendError: the head is not plain.
    """

    def __init__(self, model: torch.nn.Module, temperature: float, pad_id: int, layout: str = "auto"):
        causal: Any = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
        causal = causal.get_base_model() if hasattr(causal, "get_base_model") else causal  # without PEFT
        self.pad_id, self.temperature = pad_id, temperature
        self._keywords = packed_keywords(causal) or packing.keywords
        attach_token_scoring(causal)
        self.layouts: tuple[str, ...] = (layout,)
        self.reason = "asked for"
        if layout == "auto":
            self.layouts, self.reason = self._choose(causal)
        elif layout != "padded":
            self._prepare(causal)
        self.layout = self.layouts[0]

    @packing.without_cudnn()
    def score(
        self,
        model: torch.nn.Module,
        groups: Sequence[Group],
        need_entropy: bool = True,
        balanced: torch.Tensor | None = None,
        layout: str | None = None,
    ) -> Scores:
        """Scores of all completion tokens, group by group, completion after completion, in one pass.

        Args:
            model: this scorer's model, possibly wrapped since, with whichever adapter is active.
            groups: at least one completion. need_entropy: False skips the entropies (the reference pass).
            balanced: (N,) bool, the completion tokens that count in the auxiliary loss of a mixture of experts; prompts
                always count. None: the loss is not computed.
            layout: one of `LAYOUTS`; None for the one in use.
        """
        layout = layout or self.layout
        laid = lay_out(groups, layout, self.pad_id)
        keywords = {} if layout == "padded" else self._keywords(laid, layout)
        if balanced is not None:
            keywords["token_weights"] = token_weights(groups, balanced, layout)
        output = model(
            input_ids=laid.input_ids,
            score_positions=laid.score_positions,
            score_targets=laid.score_targets,
            temperature=self.temperature,
            need_entropy=need_entropy,
            **keywords,
        )
        return Scores(output.logps, output.entropies, output.aux_loss)

    def choose_layout(self, groups: Sequence[Group]) -> None:
        """Choose the layout for a rollout, given all its groups: prompts are shared if there is a choice and it pays.
        Unsloth's flex attention for shared prompts is slower than its kernel for sequences end to end.
        """
        if {"shared", "repeated"} <= set(self.layouts):
            pays = count_tokens(groups, "repeated") >= SHARED_PAYS * count_tokens(groups, "shared")
            self.layout = "shared" if pays else "repeated"

    def tokens(self, groups: Sequence[Group]) -> int:
        """Tokens that the model computes for these groups in one pass."""
        return count_tokens(groups, self.layout)

    @packing.without_cudnn()
    def _choose(self, model: torch.nn.Module) -> tuple[tuple[str, ...], str]:
        """The layouts that agree with single sequences, the smallest first, and a line with the reason. If both packed
        layouts use the same kernels, only the smallest is kept."""
        groups = _check_groups(model)
        with load_backend("unsloth").uncompiled():
            singles = [[Group(group.prompt, [ids])] for group in groups for ids in group.completions if len(ids)]
            single = self._check(model, singles, "padded")
            with _quiet(model, trains=False), torch.no_grad():
                together = self.score(model, groups, need_entropy=False, layout="padded").logps
            gap = (together - single[0]).abs().mean().item()
            if not gap <= 2 * _tolerance(model).mean:
                raise BackendError(
                    f"log-probs of completions alone and in a padded batch differ by {gap:.2g} nats per token: "
                    "model.name draws random numbers in training mode (a noisy router), or is not causal: train another"
                )
            _compare_with_logits(model, groups[0], single[0], self.temperature)
        refused: list[str] = []
        try:
            self._prepare(model)
        except ValueError as error:
            return ("padded",), f"padded rows: {error}"
        agree: list[str] = []
        for layout in LAYOUTS[:-1]:
            try:
                fault = _difference(self._check(model, [groups], layout), single, _tolerance(model))
            except Exception as error:  # whatever a foreign model raises, fall back to padded rows
                fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if fault is not None:
                refused.append(f"{layout} rows: {fault}")
                continue
            agree.append(layout)
            if self._keywords is packing.keywords:
                break
        if not agree:
            return ("padded",), f"padded rows; {'; '.join(refused)}"
        reason = f"{' and '.join(agree)} rows agree with single sequences"
        if len(agree) > 1:
            reason += f"; prompts are shared where repeating them takes {SHARED_PAYS} times the tokens"
        return tuple(agree), "; ".join([reason, *refused])

    def _prepare(self, model: torch.nn.Module) -> None:
        """Make the model accept packed rows. Raises ValueError, with the reason, if its layers cannot; the check might
        not see that a state leaks a little, or that a window is longer than its rows."""
        if kinds := find_other_layers(model):
            raise ValueError(f"packed sequences would reach each other through its layers ({kinds})")
        if self._keywords is packing.keywords:
            packing.install(model)

    def _check(self, model: torch.nn.Module, passes: list[list[Group]], layout: str) -> Checked:
        """Log-probabilities (N,) of the passes end to end, and gradients of a weighted sum of them."""
        trained = [value for value in model.parameters() if value.requires_grad and value.numel() <= LARGEST_WATCHED]
        # of the first and the last layers: a leak anywhere shows in one of them
        watched = trained if len(trained) <= 2 * WATCHED else trained[:WATCHED] + trained[-WATCHED:]
        scored = list[torch.Tensor]()
        tokens = sum(len(ids) for groups in passes for group in groups for ids in group.completions)
        weights = torch.linspace(-1.0, 2.0, tokens)
        with _quiet(model, bool(watched)), torch.set_grad_enabled(bool(watched)), _gradients_aside(model):
            for groups in passes:
                logps = self.score(model, groups, need_entropy=False, layout=layout).logps
                factors, weights = weights[: len(logps)].to(logps.device), weights[len(logps) :]
                if watched:  # backward(), because reentrant checkpoints refuse `autograd.grad`
                    (logps * factors).sum().backward()
                scored.append(logps.detach())
            gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in watched]
        return torch.cat(scored), [gradient.float() for gradient in gradients]


class PolicyScorer:
    """Scores groups under the policy and its reference, in the trainer's precision.

    Args:
        policy: the bare model. scorer: scores its completions. parallel: the run's processes.
        beta: of the KL penalty; 0: no reference.
        reference: "start" of training, or the "base" model without an adapter.
        reference_model: the reference if it is a separate model, else None; it is scored by a scorer like the
            policy's.
        checkpointing: keywords of gradient checkpointing, which is off in a reference pass.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        scorer: Scorer,
        parallel: Parallel,
        beta: float = 0.0,
        reference: str = "start",
        reference_model: Any = None,
        checkpointing: dict[str, Any] | None = None,
    ):
        self.policy, self.scorer, self.parallel = policy, scorer, parallel
        self.beta, self.kind, self.checkpointing = beta, reference, checkpointing
        self.reference_model = reference_model
        if reference_model is not None:
            self.reference_scorer = Scorer(reference_model, scorer.temperature, scorer.pad_id, scorer.layout)
        self.copy = getattr(policy, "peft_config", {}).get("ref")
        # with sharded weights, no process has the tensors to compare
        self._may_be_reference = reference_model is None and parallel.kind != "shards"

    @property
    def layout(self) -> str:
        """The layout in use, one of `scorer.LAYOUTS`."""
        return self.scorer.layout

    def choose_layout(self, groups: list[Group]) -> None:
        """Call it with the groups of a rollout before its passes: see `Scorer.choose_layout`."""
        self.scorer.choose_layout(groups)
        if self.reference_model is not None:
            self.reference_scorer.layout = self.scorer.layout

    def score(
        self,
        model: torch.nn.Module,
        groups: list[Group],
        need_entropy: bool = True,
        balanced: torch.Tensor | None = None,
    ) -> Scores:
        """Log-probabilities and entropies of the groups' completions, (N,); `model` is the policy, however wrapped.
        `balanced`: see `Scorer.score`."""
        with self.parallel.accelerator.autocast():
            return self.scorer.score(model, groups, need_entropy, balanced)

    def reference(self, model: torch.nn.Module, groups: list[Group]) -> torch.Tensor | None:
        """(N,) under the reference, without a graph; None while the policy equals it, or without a KL penalty."""
        return None if self.beta == 0.0 or self.is_reference() else self.score_reference(model, groups)

    def score_reference(self, model: torch.nn.Module, groups: list[Group]) -> torch.Tensor:
        """(N,) under the reference, without a graph, even while the policy equals it."""
        with torch.no_grad(), self.parallel.accelerator.autocast():
            if self.reference_model is not None:
                return self.reference_scorer.score(self.reference_model, groups, need_entropy=False).logps
            adapters = getattr(self.policy, "peft_config", {})
            with (
                disable_gradient_checkpointing(self.policy, self.checkpointing),
                use_adapter(self.policy, adapter_name="ref" if "ref" in adapters else None),
            ):
                return self.scorer.score(model, groups, need_entropy=False).logps

    def is_reference(self) -> bool:
        """Whether the policy's weights still equal the reference's; not checked any more once they have moved. Raises
        ConfigError if the model has another trainer's reference by now."""
        if getattr(self.policy, "peft_config", {}).get("ref") is not self.copy:
            raise ConfigError("a later trainer on this model replaced this one's KL reference: make a new RLOOTrainer")
        if self._may_be_reference:
            self._may_be_reference = same_as_reference(self.policy, self.kind)
        return self._may_be_reference

    def tokens(self, groups: list[Group]) -> int:
        """Tokens that a pass over these groups computes."""
        return self.scorer.tokens(groups)


def _check_groups(model: torch.nn.Module) -> list[Group]:
    """Groups of `CHECK_LENGTHS`, shorter without a GPU or if the model has fewer positions."""
    device, config = model.get_input_embeddings().weight.device, model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), getattr(model, "max_seq_length", None)]
    at_most = CHECK_SHARE_OFF_GPU if device.type == "cpu" else 1.0
    share = min([at_most, *(limit / CHECK_LONGEST for limit in limits if limit)])
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        size = max(1, int(share * length)) if length else 0
        return torch.randint(config.vocab_size, (size,), generator=generator).to(device)

    image: list[int] = getattr(model.base_model, "check_prompt", list)()  # of a model that reads images
    before = torch.tensor(image, dtype=torch.long, device=device)
    return [
        Group(torch.cat([before, draw(prompt)]), [draw(length) for length in lengths])
        for prompt, lengths in CHECK_LENGTHS
    ]


def _tolerance(model: torch.nn.Module) -> Tolerance:
    return TOLERANCE_16_BITS if is_coarse(model) else TOLERANCE


def _compare_with_logits(model: torch.nn.Module, group: Group, logps: torch.Tensor, temperature: float) -> None:
    """Compare the scoring call with the model's logits on the first completion. Raises BackendError if the head is
    more than a matrix (its own adapter, scaled logits)."""
    completion = group.completions[0][:CHECK_LOGITS]
    with _quiet(model, trains=False), torch.no_grad():
        row = torch.cat([group.prompt, completion])[None]
        logits = model(input_ids=row).logits[0, len(group.prompt) - 1 : -1].float() / temperature  # (C, V)
    if not logits.isfinite().all():
        raise BackendError("the model's logits contain a NaN or an infinity: load unbroken weights, or another dtype")
    expected = logits.log_softmax(dim=-1).gather(1, completion[:, None]).squeeze(1)
    worst = (expected - logps[: len(completion)].to(expected.device)).abs().max().item()
    if not worst <= _tolerance(model).largest:
        raise BackendError(
            f"log-probabilities differ from the model's own logits by {worst:.2g} nats: its head is not a plain "
            "matrix. The kit scores plain heads only: leave lm_head out of the adapter's target_modules"
        )


@contextmanager
def _quiet(model: torch.nn.Module, trains: bool) -> Iterator[None]:
    """Training mode (in evaluation mode, bitsandbytes has no backward pass on a CPU) without dropout, and without
    gradient checkpointing if nothing is trained; everything is restored afterwards."""
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        settings: dict[str, Any] = {"training": not isinstance(module, torch.nn.Dropout)}
        settings |= {} if trains else {"gradient_checkpointing": False}
        rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        settings |= dict.fromkeys(rates, 0.0)
        for name, value in settings.items():
            if (before := getattr(module, name, value)) != value:
                changed.append((module, name, before))
                setattr(module, name, value)
    try:
        gpus = {value.device.index for value in model.parameters() if value.is_cuda}
        with torch.random.fork_rng(devices=sorted(gpus)):
            yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@contextmanager
def _gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """A block that starts without gradients; earlier ones are restored afterwards."""
    kept = [(value, value.grad) for value in model.parameters() if value.requires_grad]
    for value, _ in kept:
        value.grad = None
    try:
        yield
    finally:
        for value, gradient in kept:
            value.grad = gradient


def _difference(actual: Checked, expected: Checked, tolerance: Tolerance) -> str | None:
    """What differs by more than the model's precision explains; None if nothing does."""
    gap = (actual[0] - expected[0]).abs()
    mean, worst = gap.mean().item(), gap.max().item()
    if not (mean <= tolerance.mean and worst <= tolerance.largest):
        return f"log-probabilities are off by {worst:.2g} nats, on average by {mean:.2g}"
    if not expected[1]:
        return None
    differences = [gradient - wanted for gradient, wanted in zip(actual[1], expected[1], strict=True)]
    off = torch.stack([part.norm() for part in differences]).norm().item()
    size = torch.stack([part.norm() for part in expected[1]]).norm().item()
    if not off <= tolerance.gradient * size:
        return f"gradients are off by {off / size:.2g} of their size"
    return None

"""Log-probabilities of groups of completions, in the smallest layout that the model computes correctly.

A `Scorer` scores a few tiny random groups in each layout, values and gradients, and uses only what agrees with single
sequences. Dropout is not switched off here.

Shapes: G groups of K_g completions, N completion tokens of all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from rloo_kit.errors import BackendError
from rloo_kit.gradient import packing
from rloo_kit.gradient.logprobs import attach_token_scoring
from rloo_kit.gradient.mixture import token_weights
from rloo_kit.gradient.packing import Group, count_tokens, lay_out
from rloo_kit.models.policy import packed_keywords

LAYOUTS = ("shared", "repeated", "padded")
CHECK_LENGTHS = ((4, (5, 0, 3)), (2, (6,)))  # P and the C_i of the groups of the self-check
TOLERANCE, TOLERANCE_16_BITS = 1e-3, 0.15  # nats, and of the gradient's size
WATCHED, LARGEST_WATCHED = 14, 2**24  # trained tensors of the self-check from either end, and elements of one


Checked = tuple[torch.Tensor, list[torch.Tensor]]  # log-probabilities and gradients


@dataclass(frozen=True)
class Scores:
    """Of the N completion tokens, group by group, completion after completion: nats, float32.

    `logps` carries a gradient where grad is enabled; `entropies` never does and is None where nobody asked. `aux_loss`
    is the auxiliary loss of a mixture of experts, where it was asked for.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None = None


class Scorer:
    """Scores completions under one model.

    Args:
        model: a causal language model, bare or wrapped (PEFT, DDP). It learns to be called for scores; any other call
            is unchanged.
        temperature: the logits are divided by it, as in sampling. pad_id: a token id that the model knows.
        layout: "auto" checks and chooses; "shared", "repeated" or "padded" takes that one, unchecked.

    Attributes:
        layout: the layout in use. reason: one line, why that one.

    Raises:
        BackendError: the head's logits are not plain ones, or `layout` is none of these.
    """

    def __init__(self, model: torch.nn.Module, temperature: float, pad_id: int, layout: str = "auto"):
        if layout not in ("auto", *LAYOUTS):
            raise BackendError(f"layout is {layout!r}; it is one of auto, {', '.join(LAYOUTS)}")
        causal = causal_model(model)
        self.pad_id, self.temperature = pad_id, temperature
        self._keywords = packed_keywords(causal) or packing.keywords
        attach_token_scoring(causal, temperature)
        if layout == "auto":
            self.layout, self.reason = self._choose(causal)
        else:
            self.layout, self.reason = layout, "asked for"
            if layout != "padded":
                self._prepare(causal)

    def score(
        self,
        model: torch.nn.Module,
        groups: Sequence[Group],
        need_entropy: bool = True,
        balanced: torch.Tensor | None = None,
    ) -> Scores:
        """Log-probabilities of all completion tokens, in one pass.

        Args:
            model: this scorer's model, however it is wrapped by now, with whichever adapter is on.
            groups: at least one completion. need_entropy: False spares the entropies (the reference pass).
            balanced: (N,) bool, the completion tokens that count in the auxiliary loss of a mixture of experts, as all
                prompts do; None: it is not made.
        """
        return self._pass(model, groups, self.layout, need_entropy, balanced)

    def tokens(self, groups: Sequence[Group]) -> int:
        """Tokens that the model computes for these groups in one pass."""
        return count_tokens(groups, self.layout)

    def _choose(self, model: torch.nn.Module) -> tuple[str, str]:
        """The first layout that agrees with single sequences, and a line with the reason."""
        groups = _check_groups(model)
        single = self._check(model, [[one] for one in _singles(groups)], "padded")
        _compare_with_logits(model, groups[0], single[0], self.temperature)
        refused: list[str] = []
        try:
            self._prepare(model)
        except ValueError as error:
            return "padded", f"padded rows: {error}"
        for layout in LAYOUTS[:-1]:
            try:
                fault = _difference(self._check(model, [groups], layout), single, _tolerance(model))
            except Exception as error:  # whatever a foreign model makes of the layout, padded rows are there
                fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if fault is None:
                return layout, "; ".join([f"{layout} rows agree with single sequences", *refused])
            refused.append(f"{layout} rows: {fault}")
        return "padded", f"padded rows; {'; '.join(refused)}"

    def _prepare(self, model: torch.nn.Module) -> None:
        if self._keywords is packing.keywords:
            packing.install(model)

    def _check(self, model: torch.nn.Module, passes: list[list[Group]], layout: str) -> Checked:
        """Log-probabilities (N,) of the passes end to end, and gradients of a weighted sum of them."""
        watched = _watched(model)
        with _quiet(model), torch.set_grad_enabled(bool(watched)):
            logps = torch.cat([self._pass(model, groups, layout, need_entropy=False).logps for groups in passes])
            weights = torch.linspace(-1.0, 2.0, len(logps), device=logps.device)
            gradients = torch.autograd.grad((logps * weights).sum(), watched, materialize_grads=True) if watched else []
        return logps.detach(), [gradient.float() for gradient in gradients]

    def _pass(
        self,
        model: torch.nn.Module,
        groups: Sequence[Group],
        layout: str,
        need_entropy: bool,
        balanced: torch.Tensor | None = None,
    ) -> Scores:
        laid = lay_out(groups, layout, self.pad_id)
        keywords = {} if layout == "padded" else self._keywords(laid, layout)
        if balanced is not None:
            keywords["token_weights"] = token_weights(groups, balanced, layout)
        found = model(
            input_ids=laid.input_ids,
            score_positions=laid.score_positions,
            score_targets=laid.score_targets,
            need_entropy=need_entropy,
            **keywords,
        )
        return Scores(found.logps, found.entropies, found.aux_loss)


def causal_model(model: torch.nn.Module) -> Any:
    """The causal language model in whatever wraps it (DDP, compilation, PEFT)."""
    unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
    return unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped


# ------------------------------------------------------------------------------------------------ the self-check


def _check_groups(model: torch.nn.Module) -> list[Group]:
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (length,), generator=generator).to(device)

    return [Group(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in CHECK_LENGTHS]


def _singles(groups: Sequence[Group]) -> list[Group]:
    return [Group(group.prompt, [one]) for group in groups for one in group.completions if len(one)]


def _watched(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Trained tensors of the first and the last layers: a leak anywhere shows in one of them."""
    trained = [value for value in model.parameters() if value.requires_grad and value.numel() <= LARGEST_WATCHED]
    return trained if len(trained) <= 2 * WATCHED else trained[:WATCHED] + trained[-WATCHED:]


def _tolerance(model: torch.nn.Module) -> float:
    is_coarse = model.get_input_embeddings().weight.dtype.itemsize == 2 or getattr(model, "is_loaded_in_4bit", False)
    return TOLERANCE_16_BITS if is_coarse else TOLERANCE


def _compare_with_logits(model: torch.nn.Module, group: Group, logps: torch.Tensor, temperature: float) -> None:
    """Whether the scoring call gives what the model's logits say, for the first completion. Raises BackendError where
    the head is more than a matrix (an adapter of its own, scaled logits)."""
    completion = group.completions[0]
    with _quiet(model), torch.no_grad():
        row = torch.cat([group.prompt, completion])[None]
        logits = model(input_ids=row).logits[0, len(group.prompt) - 1 : -1].float() / temperature  # (C, V)
    expected = logits.log_softmax(dim=-1).gather(1, completion[:, None]).squeeze(1)
    worst = (expected - logps[: len(completion)].to(expected.device)).abs().max().item()
    if not worst <= _tolerance(model):
        raise BackendError(
            f"log-probabilities differ from the model's own logits by {worst:.2g} nats: its head is no plain matrix. "
            "The kit scores plain heads only: leave lm_head out of the adapter's target_modules"
        )


@contextmanager
def _quiet(model: torch.nn.Module) -> Iterator[None]:
    """In training mode (bitsandbytes has no backward pass in the other, on a CPU), without dropout, and without
    gradient checkpointing (its reentrant form refuses `autograd.grad`); everything is as before afterwards."""
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        settings: dict[str, Any] = {"training": not isinstance(module, torch.nn.Dropout)}
        settings |= {"gradient_checkpointing": False, "attention_dropout": 0.0}
        for name, value in settings.items():
            found = getattr(module, name, value)
            if found != value and not isinstance(found, torch.nn.Module):  # Bloom's attention_dropout is a layer
                changed.append((module, name, found))
                setattr(module, name, value)
    try:
        gpus = {value.device.index for value in model.parameters() if value.is_cuda}
        with torch.random.fork_rng(devices=sorted(gpus)):
            yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _difference(found: Checked, expected: Checked, tolerance: float) -> str | None:
    """What differs by more than the model's precision explains; None where nothing does."""
    worst = (found[0] - expected[0]).abs().max().item()
    if not worst <= tolerance:
        return f"log-probabilities are off by {worst:.2g} nats"
    if not expected[1]:
        return None
    size, off = (
        torch.stack([part.norm() for part in parts]).norm().item()
        for parts in (expected[1], [mine - other for mine, other in zip(found[1], expected[1], strict=True)])
    )
    if not off <= tolerance * size:
        return f"gradients are off by {off / size:.2g} of their size"
    return None

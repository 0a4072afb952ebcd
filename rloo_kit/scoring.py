"""Log-probabilities of groups of completions, in the smallest layout that the model computes rightly.

A `Scorer` chooses once, for one model: it scores a few tiny random groups in each layout and compares values and
gradients with the same sequences one by one. What does not agree is not used, and `reason` says why: a model whose
layers drop the packing keyword, or a sliding window, costs speed, never a wrong gradient.

Left out: cutting a batch into passes that fit memory (`Scorer.tokens` says what a pass costs).

Shapes: G groups of K_g completions, N completion tokens of all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rloo_kit._stack import load_stack
from rloo_kit.errors import BackendError

load_stack()

import torch
from accelerate.utils import extract_model_from_parallel

from rloo_kit import packed_attention
from rloo_kit.logprobs import attach_token_scoring
from rloo_kit.packing import Group, Layout, count_tokens, lay_out, plan_attention

LAYOUTS = ("shared", "repeated", "padded")
CHECK_LENGTHS = ((5, (7, 0, 3)), (2, (4,)), (3, (1, 9)))  # (P, completions) of the groups of the self-check
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # nats, and of the gradient's norm
TOLERANCE_16_BITS = 0.15


@dataclass(frozen=True)
class Scores:
    """Of the N completion tokens, group by group, completion after completion: nats, float32.

    `logps` carries a gradient where grad is enabled; `entropies` never does and is None where nobody asked.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None


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
        self.pad_id = pad_id
        causal = causal_model(model)
        attach_token_scoring(causal, temperature)
        if layout == "auto":
            self.layout, self.reason = self._choose(causal)
        else:
            self.layout, self.reason = layout, "asked for"
            if layout != "padded":
                packed_attention.install(causal)

    def score(self, model: torch.nn.Module, groups: Sequence[Group], need_entropy: bool = True) -> Scores:
        """Log-probabilities of all completion tokens, in one pass, under `model`: the one of this scorer, however
        it is wrapped by now."""
        return _score(model, groups, self.layout, self.pad_id, need_entropy)

    def tokens(self, groups: Sequence[Group]) -> int:
        """Tokens that the model computes for these groups in one pass."""
        return count_tokens(groups, self.layout)

    def _choose(self, model: torch.nn.Module) -> tuple[str, str]:
        refused = []
        try:
            packed_attention.install(model)
        except ValueError as error:
            return "padded", f"padded rows: {error}"
        groups = _check_groups(model)
        single = _values_and_gradients(model, [[one] for one in _singles(groups)], "padded", self.pad_id)
        for layout in LAYOUTS[:-1]:
            try:
                packed = _values_and_gradients(model, [groups], layout, self.pad_id)
            except Exception as error:  # whatever a foreign model makes of the layout, padded rows are there
                refused.append(f"{layout}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
            fault = _difference(packed, single)
            if fault is None:
                return layout, "; ".join([f"{layout} rows agree with single sequences", *refused])
            refused.append(f"{layout}: {fault}")
        return "padded", "padded rows, since packed ones do not agree: " + "; ".join(refused)


def causal_model(model: torch.nn.Module) -> Any:
    """The causal language model in whatever wraps it (DDP, compilation, PEFT)."""
    unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
    return unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped


def _score(model: torch.nn.Module, groups: Sequence[Group], layout: str, pad_id: int, need_entropy: bool) -> Scores:
    laid = lay_out(groups, layout, pad_id)
    keywords = {} if layout == "padded" else _packed_keywords(laid)
    found = model(
        input_ids=laid.input_ids,
        score_positions=laid.score_positions,
        score_targets=laid.score_targets,
        need_entropy=need_entropy,
        **keywords,
    )
    return Scores(found.logps, found.entropies)


def _packed_keywords(laid: Layout) -> dict[str, Any]:
    """A mask for each kind of layer, none of them built: the plan says who sees whom."""
    return {
        "position_ids": laid.position_ids,
        "attention_mask": {"full_attention": None},
        "packing": plan_attention(laid),
    }


# ------------------------------------------------------------------------------------------------ the self-check


def _check_groups(model: torch.nn.Module) -> list[Group]:
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size

    def draw(length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (length,), generator=generator).to(embedding.device)

    return [Group(draw(prompt), [draw(length) for length in lengths]) for prompt, lengths in CHECK_LENGTHS]


def _singles(groups: Sequence[Group]) -> list[Group]:
    return [Group(group.prompt, [completion]) for group in groups for completion in group.completions]


def _values_and_gradients(
    model: torch.nn.Module, passes: list[list[Group]], layout: str, pad_id: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities (N,) of the passes end to end, and the gradients of a weighted sum in what is trained."""
    watched = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _quiet(model), torch.set_grad_enabled(bool(watched)):
        logps = torch.cat([_score(model, groups, layout, pad_id, need_entropy=False).logps for groups in passes])
        weights = torch.linspace(-1.0, 2.0, len(logps), device=logps.device)
        if not watched:
            return logps, []
        gradients = torch.autograd.grad((logps * weights).sum(), watched, allow_unused=True)
    return logps.detach(), [gradient.detach().float() for gradient in gradients if gradient is not None]


@contextmanager
def _quiet(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and without gradient checkpointing (its reentrant form refuses `autograd.grad`); the random
    state and every switch are as before afterwards."""
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in (("gradient_checkpointing", False), ("attention_dropout", 0.0)):
            if getattr(module, name, None):
                changed.append((module, name, getattr(module, name)))
                setattr(module, name, value)
        if isinstance(module, torch.nn.Dropout) and module.training:
            changed.append((module, "training", True))
            module.training = False
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _difference(found: tuple, expected: tuple) -> str | None:
    """What differs by more than the model's precision explains; None where nothing does."""
    logps, gradients = found
    tolerance = TOLERANCE.get(min((g.dtype for g in gradients), default=torch.float32, key=lambda d: d.itemsize), 1e-3)
    worst = (logps - expected[0]).abs().max().item()
    if not worst <= tolerance:
        return f"log-probabilities are off by {worst:.2g}"
    norm = sum(gradient.square().sum() for gradient in expected[1]) ** 0.5
    off = sum((mine - other).square().sum() for mine, other in zip(gradients, expected[1], strict=True)) ** 0.5
    if expected[1] and not off <= tolerance * norm:
        return f"gradients are off by {off / norm:.2g} of their size"
    return None

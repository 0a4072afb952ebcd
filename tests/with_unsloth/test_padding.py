"""Ragged rows through Unsloth: padded on the left, on the right, packed, and one by one, in training and evaluation.

Stock Unsloth drops the mask of left-padded rows in training mode (docs/models.md has the figures); what `load_policy`
gives keeps it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth import interpreter

PROMPT_LENGTHS, COMPLETION_LENGTHS = (1, 9, 4), (5, 2, 10)
PAD = 256
EXACT = 5e-5  # nats, and the share of a gradient


@pytest.fixture(scope="module")
def rows(unsloth: Any) -> list[tuple[Any, Any]]:
    """Prompt and completion of each row, as token ids."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(0, 256, (prompt,), generator=generator), torch.randint(0, 256, (length,), generator=generator))
        for prompt, length in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A Qwen3 with large random weights: what a token attends to matters, which a model that learnt little hides."""
    interpreter.keep_on_cpu()  # Unsloth's layers are in every Qwen3 once one was loaded
    model = make_tiny_model(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, initializer_range=0.15,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("random_model")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(load: Any, folder: Path) -> Any:
    """The model that `load_policy` gives."""
    return load(model=folder, moved=True).model


def padded(rows: list[tuple[Any, Any]], side: str) -> tuple[Any, Any]:
    """Ids and attention mask of whole rows, padded on one side."""
    import torch

    whole = [torch.cat(row) for row in rows]
    width = max(map(len, whole))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(whole):
        place = slice(width - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return ids, mask


def states_padded(backbone: Any, rows: list[tuple[Any, Any]], side: str) -> Any:
    ids, mask = padded(rows, side)
    return backbone(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]


def states_packed(backbone: Any, rows: list[tuple[Any, Any]], side: str) -> Any:
    import torch

    whole = [torch.cat(row) for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in whole], dtype=torch.int32)
    places = torch.cat([torch.arange(len(tokens)) for tokens in whole])
    found = backbone(input_ids=torch.cat(whole)[None], position_ids=places[None], packed_seq_lengths=lengths)
    return found.last_hidden_state[0]


def states_single(backbone: Any, rows: list[tuple[Any, Any]], side: str) -> Any:
    import torch

    return torch.cat([backbone(input_ids=torch.cat(row)[None]).last_hidden_state[0] for row in rows])


LAYOUTS: dict[str, Callable[..., Any]] = {
    "left": states_padded, "right": states_padded, "packed": states_packed, "single": states_single,
}  # fmt: skip


def scores(model: Any, rows: list[tuple[Any, Any]], layout: str, training: bool) -> tuple[Any, Any]:
    """Log-probabilities of all tokens but each row's first, and the gradient of a weighted sum of them by the adapter.

    The backbone is called directly, as every fused head does it; its head is applied here.
    """
    import torch

    causal = model.get_base_model()
    model.train(training)
    states = LAYOUTS[layout](causal.model, rows, layout)
    ids, logps, start = [torch.cat(row) for row in rows], [], 0
    for tokens in ids:
        logits = causal.lm_head(states[start : start + len(tokens) - 1]).float().log_softmax(-1)
        logps.append(logits.gather(1, tokens[1:, None])[:, 0])
        start += len(tokens)
    found = torch.cat(logps)
    model.zero_grad()
    (found * torch.linspace(-1, 2, len(found))).sum().backward()  # its checkpoints are reentrant: no autograd.grad
    gradients = [value.grad.flatten() for value in model.parameters() if value.requires_grad]
    model.zero_grad()
    return found.detach(), torch.cat(gradients)


@pytest.fixture(scope="module")
def singles(ours: Any, rows: list[tuple[Any, Any]]) -> dict[bool, Any]:
    """Scores of the rows one by one, in training and evaluation mode."""
    return {training: scores(ours, rows, "single", training) for training in (True, False)}


@pytest.mark.parametrize(("layout", "training"), [("left", True), ("right", True), ("packed", True), ("left", False)])
def test_every_layout_is_exact_through_load_policy(
    ours: Any, rows: Any, singles: Any, layout: str, training: bool
) -> None:
    """A batch scored in another layout than its rows alone is another policy: ratios leave the clip range, silently."""
    (expected, wanted), (found, gradient) = singles[training], scores(ours, rows, layout, training)
    nats, share = (found - expected).abs().max().item(), ((gradient - wanted).norm() / wanted.norm()).item()
    print(f"{layout:7}{'training' if training else 'evaluation':11} {nats:8.2g} nats {share:8.2g}")
    assert nats < EXACT and share < EXACT


def test_a_rollout_is_scored_as_its_rows_alone(ours: Any, rows: Any) -> None:
    """In training mode before anything was generated, where the generated trainer's own scoring is off by nats."""
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer

    groups, scorer = [Group(prompt, [completion]) for prompt, completion in rows], Scorer(ours, 1.0, PAD)
    ours.eval()
    with torch.no_grad():
        expected = torch.cat([scorer.score(ours, [group]).logps for group in groups])
        for training in (True, False):
            ours.train(training)
            ours.get_base_model().model._has_no_labels = False
            assert (scorer.score(ours, groups).logps - expected).abs().max() < EXACT, scorer.reason

"""Ragged rows through Unsloth: padded on the left, on the right, packed, and one by one, in training and evaluation.

The kit's answers, and those of the RLOO trainer that Unsloth writes on a model that FastLanguageModel has loaded as the
published recipes do. `pytest -s` prints the figures; docs/models.md has them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.with_unsloth import interpreter

PROMPT_LENGTHS, COMPLETION_LENGTHS = (1, 9, 4), (5, 2, 10)
PAD = 256
EXACT = 5e-5  # nats, and the share of a gradient
BROKEN = 0.05  # what a dropped mask does is far above it, and what rounding does far below


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


@pytest.fixture(scope="module")
def stock(unsloth: Any, folder: Path, ours: Any) -> Any:
    """The same model through Unsloth alone, as its notebooks load it."""
    import torch

    interpreter.keep_on_cpu()
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(folder), max_seq_length=128, dtype=torch.float32, load_in_4bit=False
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, lora_dropout=0, use_gradient_checkpointing="unsloth", random_state=0
    )
    adapter = dict(ours.named_parameters())
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(adapter[name])
    return model


# ------------------------------------------------------------------------------------------- one answer for each layout


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
def compare(ours: Any, rows: list[tuple[Any, Any]]) -> Callable[..., tuple[float, float]]:
    """`compare(model, layout, training)`: how far a layout is from the kit's model on the same rows one by one, in
    that mode: worst nats, and the share of the gradient that is wrong."""
    singles: dict[bool, Any] = {}

    def run(model: Any, layout: str, training: bool) -> tuple[float, float]:
        if training not in singles:
            singles[training] = scores(ours, rows, "single", training)
        expected, wanted = singles[training]
        found, gradient = scores(model, rows, layout, training)
        nats, share = (found - expected).abs().max().item(), ((gradient - wanted).norm() / wanted.norm()).item()
        name = "kit" if model is ours else "stock"
        print(f"{name:6}{layout:7}{'training' if training else 'evaluation':11} {nats:8.2g} nats {share:8.2g}")
        return nats, share

    return run


# ----------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_every_layout_is_exact_through_load_policy(ours: Any, compare: Any, layout: str, training: bool) -> None:
    """A batch scored in another layout than its rows alone is another policy: ratios leave the clip range, silently."""
    nats, share = compare(ours, layout, training)
    assert nats < EXACT and share < EXACT


def test_the_trainers_own_scoring(stock: Any, ours: Any, rows: Any, tmp_path: Path) -> None:
    """A rollout as the loop has it: prompts padded on the left, completions on the right.

    In training mode, before anything was generated, the generated trainer's log-probabilities are off by nats: that is
    the policy whose gradient it takes. Where this fails Unsloth has closed the trap itself: then the attribute that
    `load` of `models/unsloth.py` sets may go. The kit's have to be those of the rows alone in either mode.
    """
    import torch

    from rloo_kit.gradient.packing import Group
    from rloo_kit.gradient.scorer import Scorer

    groups = [Group(prompt, [completion]) for prompt, completion in rows]
    (ids, mask), width = rollout(rows), max(COMPLETION_LENGTHS)
    scorer, trainer = Scorer(ours, 1.0, PAD), make_stock_trainer(stock, tmp_path)
    ours.eval()
    with torch.no_grad():
        expected = torch.cat([scorer.score(ours, [group]).logps for group in groups])
    for training in (True, False):
        ours.train(training)
        stock.train(training)
        stock.get_base_model().model._has_no_labels = False
        with torch.no_grad():
            found = scorer.score(ours, groups).logps
            theirs, _, _ = trainer._get_per_token_logps_and_entropies(stock, ids, mask, width)
        assert (found - expected).abs().max() < EXACT, scorer.reason
        nats = (theirs[mask[:, -width:].bool()] - expected).abs().max().item()
        print(f"stock trainer {'training' if training else 'evaluation':11} {nats:8.2g} nats")
        assert (nats > BROKEN) if training else (nats < EXACT)


def make_stock_trainer(model: Any, folder: Path) -> Any:
    """The RLOO trainer that Unsloth writes, with its own config."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    assert trl.RLOOTrainer.__name__ == "UnslothRLOOTrainer"
    return trl.RLOOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.RLOOConfig(output_dir=str(folder), use_cpu=True, bf16=False, beta=0.0, report_to="none"),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=AutoTokenizer.from_pretrained(model.config.name_or_path, padding_side="left"),
    )


def rollout(rows: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Ids and mask of prompts padded on the left and completions padded on the right, as TRL puts them together."""
    import torch
    from trl.trainer.utils import pad

    prompts, completions = zip(*rows, strict=True)
    parts = [(prompts, "left"), (completions, "right")]
    ids = [pad(list(part), padding_value=PAD, padding_side=side) for part, side in parts]
    masks = [pad([torch.ones_like(row) for row in part], padding_value=0, padding_side=side) for part, side in parts]
    return torch.cat(ids, dim=1), torch.cat(masks, dim=1)

"""Log-probabilities and gradients on the GPU: every layout against single sequences, 16 bits against float32.

By the backend of the process: Unsloth, or transformers with RLOO_KIT_BACKEND=transformers; `run.py` runs both.
"""

from pathlib import Path
from typing import Any

import cells
import pytest

from tests.on_gpu import scores
from tests.on_gpu.conftest import id_reward

MEAN_NATS, MAX_NATS = 0.03, 0.25  # of bf16 against bf16 in another order; a dropped mask is off by one nat and more
GRADIENT = 0.1  # of the gradient's size, 16 bits against float32; a dropped mask is off by half
LAYOUTS = ("padded", "repeated", "shared")


def difference(found: Any, expected: Any) -> dict[str, float]:
    """In nats."""
    off = (found.float() - expected.float()).abs()
    return {"mean": round(off.mean().item(), 7), "max": round(off.max().item(), 7)}


def is_close(off: dict[str, float]) -> bool:
    return off["mean"] < MEAN_NATS and off["max"] < MAX_NATS


def left_padded(policy: Any, groups: list[Any]) -> Any:
    """(N,) as stock TRL scores: prompts padded on the left, and a call of the backbone with the mask of the padding."""
    import torch

    from rloo_kit.gradient.logprobs import score_tokens

    causal = policy.model.get_base_model()
    rows = [(group.prompt, one) for group in groups for one in group.completions]
    width, room = max(len(prompt) for prompt, _ in rows), max(len(one) for _, one in rows)
    ids = torch.full((len(rows), width + room), policy.tokenizer.pad_token_id, device=causal.device)
    mask = torch.zeros_like(ids)
    for row, (prompt, one) in enumerate(rows):
        ids[row, width - len(prompt) : width + len(one)] = torch.cat([prompt, one])
        mask[row, width - len(prompt) : width + len(one)] = 1
    with scores.autocast(causal.device):
        states = causal.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        places = [states[row, width - 1 : width - 1 + len(one)] for row, (_, one) in enumerate(rows)]
        targets = torch.cat([one for _, one in rows])
        return score_tokens(torch.cat(places), causal.get_output_embeddings().weight, None, targets, 1.0, False)[0]


def stock_left_padded(policy: Any, groups: list[Any]) -> Any:
    """The same without what the kit tells Unsloth's backbone: the mask that its training forward drops."""
    backbone = policy.model.get_base_model().model
    kept = {name: vars(backbone).pop(name) for name in ("_unsloth_keep_padding_mask", "_has_no_labels")
            if name in vars(backbone)}  # fmt: skip
    try:
        return left_padded(policy, groups)
    finally:
        vars(backbone).update(kept)


@pytest.fixture
def policy(load: Any, make_run: Any, checkpoint: Any) -> Any:
    """Qwen3-0.6B in 4-bit with an adapter that is not the identity."""
    loaded = load(make_run(checkpoint("0.6b"), "model.load_in_4bit=true"))
    scores.move_adapter(loaded)
    return loaded


def test_every_layout_scores_as_single_sequences(policy: Any, gpu: Any, interpreted: bool) -> None:
    """Unsloth's training forward drops the mask of left-padded rows, silently: stock's answer is next to ours."""
    import torch

    from rloo_kit.gradient.scorer import Scorer

    chosen = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id)
    cells.report(backend=gpu.backend, layout=chosen.layout, reason=chosen.reason)
    assert chosen.layout in ("shared", "repeated"), chosen.reason
    groups = scores.make_groups(policy.model.device)
    singles = [[one] for one in scores.one_by_one(groups)]
    policy.model.eval()
    with torch.no_grad():
        expected = scores.log_probs(policy, singles, "padded")
    cells.report(tokens=len(expected), mean_logp=round(expected.mean().item(), 3))
    required = {"padded", "repeated", chosen.layout}
    for mode in ("train", "eval"):
        policy.model.train(mode == "train")
        with torch.no_grad():
            found = {"one by one": difference(scores.log_probs(policy, singles, "padded"), expected)}
            for layout in LAYOUTS:
                found[layout] = difference(scores.log_probs(policy, [groups], layout), expected)
            found["left-padded"] = difference(left_padded(policy, groups), expected)
            stock = difference(stock_left_padded(policy, groups), expected)
        cells.report(**{f"nats_{mode}": found | {"stock, left-padded": stock}})
        if mode == "train" and interpreted:  # known on the CPU; on a GPU it is what this cell is to find out
            assert not is_close(stock), "the trap of left padding is gone: so may be what the kit does against it"
        bad = {name: off for name, off in found.items() if not is_close(off) and name not in LAYOUTS[1:]}
        bad |= {name: found[name] for name in required if not is_close(found[name])}
        assert not bad, f"{mode} mode, nats off single sequences: {bad}"


def test_on_policy_the_ratio_is_exactly_one(policy: Any, make_run: Any, train: Any, checkpoint: Any) -> None:
    """Two passes over the same weights drift apart in bf16, and a sum over a long completion leaves the clip range."""
    for mode in ("fast", "balanced", "low"):
        run = make_run(checkpoint("0.6b"), "model.load_in_4bit=true", f"rloo.memory={mode}", "rloo.max_steps=1")
        (row,) = [row for row in train(run, policy, id_reward, overwrite=True).metrics if "grad_norm" in row]
        cells.report(**{f"memory_{mode}": {name: row[name] for name in ("val/ratio", "grad_norm", "step_time")}})
        assert row["val/ratio"] == 1.0 and row["clip_ratio/region_mean"] == 0.0 and row["grad_norm"] > 0


def test_gradients_against_float32(load: Any, make_run: Any, checkpoint: Any, gpu: Any, tmp_path: Path) -> None:
    """16-bit arithmetic and packed rows may cost a few per cent of the gradient, not its direction."""
    import torch

    from rloo_kit import save_adapter
    from rloo_kit.gradient.scorer import Scorer

    model = checkpoint("0.6b")
    policy = load(make_run(model))
    scores.move_adapter(policy)
    adapter = save_adapter(policy, tmp_path / "adapter")
    reference = scores.without_unsloth(model, adapter, tmp_path / "float32.pt")
    expected = reference["gradients"]
    groups = scores.make_groups(policy.model.device)
    chosen = Scorer(policy.model, 1.0, policy.tokenizer.pad_token_id).layout
    cells.report(backend=gpu.backend, layout=chosen, dtype=str(policy.model.dtype))
    for layout in dict.fromkeys(("padded", "repeated", chosen)):
        found = scores.gradients(policy, [groups], layout)
        assert found.keys() == expected.keys()
        pairs = [(found[name].flatten(), expected[name].flatten()) for name in expected]
        mine, theirs = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        error = ((mine - theirs).norm() / theirs.norm()).item()
        cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=0).item()
        cells.report(**{f"gradient_{layout}": {"relative_error": round(error, 6), "cosine": round(cosine, 6)}})
        assert error < GRADIENT and cosine > 0.99, f"{layout} rows: off by {error:.3f} of its size"
    policy.model.eval()
    with torch.no_grad():
        logps = scores.log_probs(policy, [groups], chosen)
    off = difference(logps.cpu(), reference["logps"])
    cells.report(nats_off_float32=off)
    assert is_close(off)

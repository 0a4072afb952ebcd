"""scripts/minimal_rloo.py: the step of the kit's trainer in plain torch, a script that runs and learns, its page."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loop.conftest import TWO_GROUPS, by_length, with_adapter
from tests.loop.test_equality_with_stock import RELATIVE, _batch_loss_gradients, _make, _sides

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "minimal_rloo.py"
PAGE = ROOT / "docs" / "loop.md"
K = 4
PROMPTS = ["What is 1+1?", "A much longer prompt than the others"]


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    """The script's functions; the backend that it chooses for its process is not that of the tests after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLOO_KIT_BACKEND", "transformers")
        return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def drift(policy: Any) -> None:
    """Move the weights as an optimizer step between rollout and loss would."""
    import torch

    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.2 * torch.sin(torch.arange(parameter.numel()).view_as(parameter) * 1.7))


def step_of_the_script(
    script: SimpleNamespace, policy: Any, tokenizer: Any, is_moved: bool, beta: float, epsilon: float
) -> tuple[Any, Any, Any]:
    """The same three, by the lines of the script's loop."""
    import torch

    prompts = [ids for ids in tokenizer(PROMPTS)["input_ids"] for _ in range(K)]
    rewards = torch.tensor(by_length(TWO_GROUPS))
    logps = script.token_logps(policy, prompts, TWO_GROUPS)
    old_logps = logps.detach()
    charged = script.charge_kl(rewards, policy, old_logps, prompts, TWO_GROUPS, beta)
    advantages = script.leave_one_out(charged, K)
    if is_moved:
        drift(policy)
        logps = script.token_logps(policy, prompts, TWO_GROUPS)
    loss = script.clipped_loss(logps, old_logps, advantages, epsilon)
    loss.backward()
    return advantages, loss.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_moved", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_step_is_the_trainers(
    beta: float,
    is_moved: bool,
    script: SimpleNamespace,
    make_tiny_model: Callable[..., Any],
    tiny_tokenizer: Any,
    tmp_path: Path,
) -> None:
    """A script that is read to understand the kit would teach another algorithm once one of the two drifts."""
    import torch

    options = {"beta": beta, "epsilon": 0.05, "epsilon_high": 0.05, "reference": "base"}
    policy, tokenizer = with_adapter(make_tiny_model()), tiny_tokenizer
    trainer = _make(_sides()[1], policy, tokenizer, tmp_path, [by_length], num_iterations=1 + is_moved, **options)
    kit = _batch_loss_gradients(trainer, drift=0.2 if is_moved else None)
    plain = step_of_the_script(script, with_adapter(make_tiny_model()), tokenizer, is_moved, beta, 0.05)
    (wanted, found) = [torch.cat([grads[name].flatten() for name in sorted(kit[2])]) for grads in (kit[2], plain[2])]
    assert plain[0].abs().max() > 0.05 and found.norm() > 1e-3, "the case carries no signal"
    assert (plain[0] - kit[0]).norm() <= RELATIVE * kit[0].norm()
    assert abs(plain[1] - kit[1]) <= RELATIVE * max(1.0, abs(kit[1]))
    assert (found - wanted).norm() <= RELATIVE * wanted.norm()


def test_sampling_is_not_touched_by_padding_and_cache(
    script: SimpleNamespace, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    """A wrong position or mask samples from another policy: sharpened logits give what each prompt alone gives."""
    import torch

    model, ends = make_tiny_model(tie_word_embeddings=False, initializer_range=0.3), [256, 258, *range(20)]

    def sharpened(tokens: Any, **options: Any) -> Any:
        out = model(tokens, **options)
        out.logits = out.logits * 1e5
        return out

    prompts = tiny_tokenizer(["a", "a longer one", "b", "the longest of all"])["input_ids"]
    rows = script.sample(sharpened, prompts, ends)
    assert len({len(row) for row in rows}) > 1 and any(row[-1] in ends for row in rows), "all rows end alike"
    for prompt, row in zip(prompts, rows, strict=True):
        alone: list[int] = []
        while len(alone) < script.MAX_TOKENS and not set(alone) & set(ends):
            with torch.no_grad():
                alone.append(int(model(torch.tensor([prompt + alone])).logits[0, -1].argmax()))
        assert row == alone


def run_script(*words: Any) -> list[float]:
    """Run it as a user does; the accuracies that it printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"^(?:before|after): accuracy (\S+) on", done.stdout, flags=re.M)]


@pytest.mark.slow
def test_it_runs(tiny_folder: Path) -> None:
    """A script that only its functions' tests call breaks in its last lines. A random model has nothing right."""
    assert run_script("--model", tiny_folder, "--steps", 2, "--held-out", 8, "--beta", 0.1) == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.long
def test_it_learns() -> None:
    """Its page promises that it does; a sign that is wrong in the loss shows here alone."""
    before, after = run_script("--steps", 25, "--held-out", 300)
    assert after > before + 0.3, (before, after)


def test_the_page_quotes_the_script() -> None:
    """A page that explains lines which are no longer there explains nothing."""
    text = SCRIPT.read_text(encoding="utf-8")
    quoted = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(quoted) >= 4
    for code in quoted:
        assert code in text, code
    body = text.partition('"""\n\nimport argparse')[2]
    assert sum(bool(line.strip()) for line in body.splitlines()) <= 150, "the page says 150 lines"

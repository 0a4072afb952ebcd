"""The blocks of references/related-methods.md, run in their order on a tiny model: what they write, the next one reads.

TRL's Triton kernel gets a pure-torch stand-in, as in test_equality_with_stock.py; sizes are cut. Unsloth's block is
left out here (tests/with_unsloth).
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.skill.pages import ROOT, find_blocks

pytestmark = pytest.mark.slow
SMALL = 'use_cpu=True, bf16=False, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, '
RUN = """
run: {{evaluate: false, report: false, sample_every_steps: 0}}
model: {{name: "{model}", max_seq_length: 128}}
data: {{source: embedded/addition, num_prompts: 40, test_size: 4, max_prompt_length: 64}}
rewards: [{{name: reward_model, params: {{model: outputs/scorer/model, max_length: 128}}}}]
rloo: {{max_steps: 1, per_device_train_batch_size: 4, num_generations: 2, max_completion_length: 8, beta: 0.01}}
"""
CHANGES = (
    (r"((?:Reward|DPO)Config\()", rf"\1{SMALL}"),
    (r'"Qwen/Qwen3-0.6B"', "TINY"),
    (r'dtype="bfloat16", device_map="auto"', 'dtype="float32"'),
    (r"max_new_tokens=2048", "max_new_tokens=8"),
    (r"151668", "260"),
)


def torch_head(
    hidden: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    temperature: float,
    _chunk: Any,
    _cap: Any,
    scale: float,
    wanted: Any,
) -> tuple[Any, ...]:
    """The contract of TRL's fused head: log-probabilities with a gradient, and what the trainers log."""
    import torch

    logits = (torch.nn.functional.linear(hidden, weight, bias) * scale / temperature).float()
    logps = logits.log_softmax(dim=-1)
    entropy = -(logps.exp() * logps).sum(dim=-1).detach() if "entropy" in wanted else None
    mean = logits.mean(dim=-1).detach() if "mean_logits" in wanted else None
    is_top = logits.argmax(dim=-1) == labels if "is_top1" in wanted else None
    return logps.gather(1, labels[:, None]).squeeze(1), entropy, None, mean, is_top


def test_the_blocks_run_in_their_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path, make_tiny_model: Any, tiny_tokenizer: Any
) -> None:
    """What the scorer writes is what RLOO goes on from: a name that changed breaks the chain."""
    from datasets import Dataset
    from trl.trainer import utils

    import rloo_kit as kit

    monkeypatch.chdir(tmp_path)
    stand_in = type("StandIn", (), {"apply": staticmethod(torch_head)})
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", stand_in)
    pairs = [{"prompt": f"{n}+1=", "chosen": f"</think>{n + 1}", "rejected": f"</think>{n}"} for n in range(8)]
    names: dict[str, Any] = {"TINY": str(tiny_folder), "preferences": Dataset.from_list(pairs)}
    page = "references/related-methods.md"
    blocks = find_blocks(page, (ROOT / page).read_text(encoding="utf-8"), "python")
    ran = 0
    for block in blocks:
        code = block.code
        if "unsloth" in code:
            continue
        for pattern, small in CHANGES:
            code = re.sub(pattern, small, code)
        if "outputs/my_run" in code:  # the page uses a run, whose reward the blocks above have trained
            (tmp_path / "configs").mkdir()
            (tmp_path / "configs" / "my_run.yaml").write_text(RUN.format(model=tiny_folder))
            run = kit.load_config("configs/my_run.yaml")
            policy = kit.load_policy(run)
            data = kit.load_data(run, policy.tokenizer)
            kit.train(run, policy, data, kit.build_rewards(run, policy.tokenizer))
        if "model=model" in code or "base_model" in code:
            names |= {"model": make_tiny_model(), "base_model": make_tiny_model(), "tokenizer": tiny_tokenizer}
        exec(compile(code, block.place, "exec"), names)
        ran += 1
    assert ran == len(blocks) - 1 >= 4
    assert isinstance(names["answer"], str)

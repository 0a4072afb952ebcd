"""The embedded model's sizes, and the usual work that tests of the plan change."""

from dataclasses import replace
from typing import Any

from rloo_kit.config.run import OLD_TARGETS as PROJECTIONS
from rloo_kit.plan.parts import Workload
from rloo_kit.plan.shapes import EMBEDDED, EMBEDDED_ROWS, ModelShape, shape_of_config


def work_of(shape: ModelShape, **changes: Any) -> Workload:
    """A run on a GPU: LoRA r = 16 in 4-bit with 8-bit Adam, Unsloth's checkpointing, one sequence a pass."""
    given = Workload(
        shape=shape, four_bit=True, weight_bytes=2, compute_bytes=2, lora_rank=16, lora_targets=tuple(PROJECTIONS),
        optim="adamw_8bit", checkpointing="offloaded", fused=True, tokens_per_pass=1, whole_groups=False,
        reference="none", prompt_tokens=0, completion_tokens=4096, num_generations=8, completions=8,
        on_cuda=True,
    )  # fmt: skip
    return replace(given, **changes)


def test_numbers_that_are_held_twice_agree() -> None:
    """The arithmetic may not import torch, so it holds some numbers of modules that do."""
    from rloo_kit.data import chat as tokenizer
    from rloo_kit.models import cold_start

    assert EMBEDDED_ROWS == tokenizer.ROWS
    for plan in cold_start.PLANS.values():
        config = cold_start.model_config(plan, tokenizer.ROWS["compact"]).to_dict()
        assert replace(shape_of_config(config), source=EMBEDDED.source) == EMBEDDED

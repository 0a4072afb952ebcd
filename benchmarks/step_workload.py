"""The workload of both sides of `rloo_step.py`: a small Qwen3, prompts, completion lengths and rewards, all fixed.

The lengths are the quantiles of a lognormal distribution between 64 and 889 tokens (mean 284 for 16 completions), dealt
to the groups in the same way in every run. In a batch padded to its longest prompt and its longest completion, 61 % is
padding, as in the workload of a thinking model. A reward is a completion's length, so no group ties unless `tied` is
set. Left out: real text, because the cost of a step does not depend on it.
"""

import itertools
import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

COMPLETIONS = 16
SHORTEST, LONGEST, SIGMA = 64, 889, 0.75
PROMPT_TOKENS = (94, 108)  # the shortest and the longest; 101 on average
BACKBONE = {
    "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
LORA = {
    "r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One step: a micro-batch is one group, on both sides.

    Attributes:
        num_generations: K. tied: every completion of half of the groups gets the same reward.
        longest: tokens of the longest completion; None for LONGEST.
    """

    num_generations: int = 4
    vocabulary: int = 2048
    checkpointing: bool = False
    beta: float = 0.05
    tied: bool = False
    completions: int = COMPLETIONS
    longest: int | None = None

    @property
    def groups(self) -> int:
        return self.completions // self.num_generations

    @property
    def label(self) -> str:
        parts = [f"K {self.num_generations}"] + [f"up to {self.longest} tokens"] * bool(self.longest)
        parts += [f"vocabulary {self.vocabulary}", f"beta {self.beta:g}"]
        return ", ".join(parts + ["checkpointing"] * self.checkpointing + ["half of the groups tied"] * self.tied)


def completion_lengths(workload: Workload) -> list[int]:
    """Tokens of each completion, the end token included; the groups' shares of the tokens are as equal as possible.

    >>> values = completion_lengths(Workload())
    >>> min(values), max(values), round(statistics.mean(values))
    (64, 889, 284)
    """
    normal = statistics.NormalDist()
    scores = [normal.inv_cdf((index + 0.5) / workload.completions) for index in range(workload.completions)]
    median = (workload.longest or LONGEST) / math.exp(SIGMA * scores[-1])
    values = [max(SHORTEST, round(median * math.exp(SIGMA * score))) for score in scores]
    random.Random(0).shuffle(values)
    return values


def tied_groups(workload: Workload) -> list[int]:
    """Half of the groups: those whose tokens are closest to half of all; none unless the workload is `tied`.

    >>> tied_groups(Workload()), len(tied_groups(Workload(tied=True)))
    ([], 2)
    """
    if not workload.tied:
        return []
    lengths, size = completion_lengths(workload), workload.num_generations
    shares = [sum(lengths[group * size : (group + 1) * size]) for group in range(workload.groups)]
    choices = itertools.combinations(range(workload.groups), workload.groups // 2)
    return list(min(choices, key=lambda chosen: abs(sum(shares[group] for group in chosen) - sum(lengths) / 2)))


def prompt_rows(workload: Workload) -> list[dict[str, Any]]:
    """One row for each group: a prompt of about 101 bytes (as many tokens), and whether its group ties."""
    shortest, longest = PROMPT_TOKENS
    tied = tied_groups(workload)
    rows = []
    for group in range(workload.groups):
        size = shortest + (longest - shortest) * group // max(workload.groups - 1, 1)
        text = f"Problem {group}: " + " ".join(f"{17 * n + group} + {23 * n}" for n in range(40))
        rows.append({"prompt": text[:size], "tied": group in tied})
    return rows


def completions(workload: Workload, end_id: int) -> list[list[int]]:
    """The canned completions of a step, group by group: random bytes, then the end token."""
    chance = random.Random(1)
    return [[chance.randrange(250) for _ in range(length - 1)] + [end_id] for length in completion_lengths(workload)]


def length_reward(completion_ids: list[list[int]], tied: list[bool], **_: Any) -> list[float]:
    """The length in thousands of tokens; 1 in a tied group."""
    return [1.0 if even else len(ids) / 1000 for ids, even in zip(completion_ids, tied, strict=True)]

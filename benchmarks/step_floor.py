"""The lower bound of a step's time: the arithmetic that it must do, and the bytes that it must read.

A step's training part passes every real token once forward and once backward through the matrices, the attention and
the head, and with a KL penalty once more forward for the reference; operations divided by the GPU's rate give seconds.
For each token of its longest completion, a rollout reads every weight once, and the keys and values of the unfinished
rows; bytes divided by the GPU's bandwidth give seconds. The first hour measures both rate and bandwidth.

Not counted, so that it stays a lower bound: padding, recomputing for checkpoints, unpacking 4-bit weights, the adapter
(rank 16: 1 %), norms, the optimizer, launches, and the host. Nothing here imports torch.
"""

from collections.abc import Sequence

from rloo_kit.plan.parts import nf4_bytes
from rloo_kit.plan.shapes import ModelShape


def matrix_flops(shape: ModelShape, prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> float:
    """Floating-point operations of one forward pass through the matrices and, for completions, the head.

    Args:
        prompts: tokens of each group's prompt, which is computed once. completions: tokens of each group's completions.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> round(matrix_flops(PUBLISHED["4b"], [0], [[1]]) / 1e9, 1)  # twice 4.02e9 weights
    8.0
    """
    scored = sum(map(sum, completions))
    return 2.0 * shape.body_weights * (sum(prompts) + scored) + 2.0 * shape.vocab_size * shape.hidden_size * scored


def attention_flops(shape: ModelShape, prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> float:
    """Floating-point operations of one forward pass: scores and weighted values of every pair of tokens that attend.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> attention_flops(PUBLISHED["4b"], [1], [[1]]) / (4 * 36 * 4096)  # the first sees itself, the second both
    3.0
    """
    pairs = 0.0
    for prompt, lengths in zip(prompts, completions, strict=True):
        pairs += prompt * (prompt + 1) / 2 + sum(length * prompt + length * (length + 1) / 2 for length in lengths)
    return 4.0 * shape.query_size * shape.num_attention * pairs


def training_flops(
    shape: ModelShape, prompts: Sequence[int], completions: Sequence[Sequence[int]], beta: float
) -> float:
    """Floating-point operations of a step's training part: forward, backward (without the frozen weights' gradients),
    and the reference's pass.

    The backward pass computes only the gradients of activations: as much as the forward pass for a matrix, twice as
    much for attention, whose two products have two gradients each.
    """
    matrices, attention = (count(shape, prompts, completions) for count in (matrix_flops, attention_flops))
    return 2 * matrices + 3 * attention + (matrices + attention if beta else 0.0)


def rollout_bytes(shape: ModelShape, prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> float:
    """The fewest bytes that a rollout with 4-bit weights and a 16-bit cache reads, all rows at once.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> round(rollout_bytes(PUBLISHED["4b"], [0], [[1]]) / 2**30, 2)  # one token reads the weights once
    2.47
    """
    body = sum(len(layers) * sum(nf4_bytes(r * c) for r, c in one.values()) for layers, one in shape.matrices)
    head = 2 * shape.vocab_size * shape.hidden_size
    total = float(max(map(max, completions)) * (body + head))
    for prompt, lengths in zip(prompts, completions, strict=True):
        total += sum(length * prompt + length * (length + 1) / 2 for length in lengths) * 2 * shape.cache_elements
    return total

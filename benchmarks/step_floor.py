"""The floor under a step: the arithmetic that it cannot do without, and the bytes that it cannot leave unread.

A step's training part has to push every real token once forward and once backward through the matrices, the attention
and the head, and with a KL penalty once more forward for the reference; operations over the GPU's rate give seconds.
A rollout has to read every weight once a token of its longest completion, and the keys and values of the rows that are
still going; bytes over the GPU's bandwidth give seconds. The first hour measures both, rate and bandwidth.

Not counted, so that it is a floor: padding, recomputing for checkpoints, unpacking 4-bit weights, the adapter (rank 16:
1 %), norms, the optimizer, launches, and the host. Nothing here imports torch.
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
    """Of one forward pass: scores and weighted values of every pair of tokens that see each other.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> attention_flops(PUBLISHED["4b"], [1], [[1]]) / (4 * 36 * 4096)  # the first sees itself, the second both
    3.0
    """
    pairs = 0.0
    for prompt, lengths in zip(prompts, completions, strict=True):
        pairs += prompt * (prompt + 1) / 2 + sum(length * prompt + length * (length + 1) / 2 for length in lengths)
    return 4.0 * shape.query_size * shape.num_layers * pairs


def training_flops(
    shape: ModelShape, prompts: Sequence[int], completions: Sequence[Sequence[int]], beta: float
) -> float:
    """Of a step's training part: forward, backward (without the frozen weights' gradients), and the reference's pass.

    The backward pass computes the gradients of activations alone: as much as the forward pass for a matrix, twice as
    much for attention, whose two products have two gradients each.
    """
    matrices, attention = (count(shape, prompts, completions) for count in (matrix_flops, attention_flops))
    return 2 * matrices + 3 * attention + (matrices + attention if beta else 0.0)


def rollout_bytes(shape: ModelShape, prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> float:
    """Bytes that a rollout of 4-bit weights and a 16-bit cache reads at least, all rows at once.

    >>> from rloo_kit.plan.shapes import PUBLISHED
    >>> round(rollout_bytes(PUBLISHED["4b"], [0], [[1]]) / 2**30, 2)  # one token reads the weights once
    2.47
    """
    body = shape.num_layers * sum(nf4_bytes(rows * columns) for rows, columns in shape.matrices.values())
    head = 2 * shape.vocab_size * shape.hidden_size
    total = float(max(map(max, completions)) * (body + head))
    for prompt, lengths in zip(prompts, completions, strict=True):
        total += sum(length * prompt + length * (length + 1) / 2 for length in lengths) * 2 * shape.cache_elements
    return total

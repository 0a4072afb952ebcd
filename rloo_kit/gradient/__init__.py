"""From rewards and log-probs to gradients: advantages, objective, packing, scoring, passes."""

from rloo_kit._stack import load_stack

load_stack()

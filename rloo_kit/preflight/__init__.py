"""What a preflight needs the model for: a probe rollout, and optimizer steps at full length."""

from rloo_kit._stack import load_stack

load_stack()

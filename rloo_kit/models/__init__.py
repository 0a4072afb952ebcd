"""Loading a policy: backends, checkpoints, adapters, parallelism."""

from rloo_kit._stack import load_stack

load_stack()

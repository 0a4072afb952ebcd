"""vLLM, in the trainer's process and as a server: two engines."""

from rloo_kit._stack import load_stack

load_stack()

"""The embedded model: a tiny Qwen3 that is built offline on the CPU."""

from rloo_kit._stack import load_stack

load_stack()

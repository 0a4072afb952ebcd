"""A trained model for other programs: adapter, merged weights, GGUF, vLLM, each checked against what was trained."""

from rloo_kit._stack import load_stack

load_stack()

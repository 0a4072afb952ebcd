"""The built-in models: the embedded ones with their cold start, and SmolLM2."""

from rloo_kit._stack import load_stack

load_stack()

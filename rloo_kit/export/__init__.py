"""Export a trained model for other programs (adapter, merged weights, GGUF, vLLM) and check it against the policy."""

from rloo_kit._stack import load_stack

load_stack()

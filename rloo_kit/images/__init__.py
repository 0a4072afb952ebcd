"""Images in prompts: read, written into prompts as tokens, and seen by the model."""

from rloo_kit._stack import load_stack

load_stack()

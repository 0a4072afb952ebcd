"""Images in prompts: from files to pixel values of a vision-language model."""

from rloo_kit._stack import load_stack

load_stack()

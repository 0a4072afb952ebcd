"""The RLOO loop: step, trainer, options, metrics, callbacks, whole runs."""

from rloo_kit._stack import load_stack

load_stack()

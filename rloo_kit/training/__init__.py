"""Whole trainings: RLOO from a configuration, on demonstrations, of a reward model; what they print and measure."""

from rloo_kit._stack import load_stack

load_stack()

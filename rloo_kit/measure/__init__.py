"""Measured memory: peaks on real devices, full caches, random checkpoints."""

from rloo_kit._stack import load_stack

load_stack()

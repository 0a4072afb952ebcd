"""Sampling completions: engines, caches, thinking budgets, servers."""

from rloo_kit._stack import load_stack

load_stack()

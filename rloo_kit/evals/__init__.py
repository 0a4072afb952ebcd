"""Evaluation of a policy: accuracy, answer judges, difficulty of prompts."""

from rloo_kit._stack import load_stack

load_stack()

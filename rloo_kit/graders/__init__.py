"""Rewards for open tasks: judge, code, trained reward models, math-verify, verifiers of reasoning-gym."""

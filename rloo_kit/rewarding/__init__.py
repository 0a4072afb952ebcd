"""Rewards at run time: registry, guard, worker processes. The worker process never loads torch."""

"""A first run on one's own data: a file that fits this machine, a reward with its test. Never torch."""

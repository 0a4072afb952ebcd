"""A first run on your own data: a config that fits this machine, a reward and its test. Never imports torch."""

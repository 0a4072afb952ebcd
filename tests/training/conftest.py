"""The fixtures of the loop's tests: whole runs are tested on the same tiny model."""

from tests.loop.conftest import make_trainer, start, trl_train, write_config

__all__ = ["make_trainer", "start", "trl_train", "write_config"]

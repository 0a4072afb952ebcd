"""The loop's trainer, for what an engine does inside it, and its launcher of several processes."""

from tests.loop.conftest import make_trainer  # noqa: F401
from tests.loop.test_parallel import launch  # noqa: F401

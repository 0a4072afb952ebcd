"""The loop's trainer, for what an engine does inside it."""

from tests.loop.conftest import make_trainer  # noqa: F401

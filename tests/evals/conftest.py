"""The loop's runs, for what is measured before they train."""

from tests.loop.conftest import start, write_config  # noqa: F401

"""The facts of this machine are collected once, as in tests/runs."""

from tests.runs.conftest import versions_once  # noqa: F401

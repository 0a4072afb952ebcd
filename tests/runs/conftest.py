"""Facts of this machine are collected once: git and the versions of all packages take a fifth of a second each time."""

import functools

import pytest

from rloo_kit.runs import folder

describe_once = functools.cache(folder.describe_versions)


@pytest.fixture(autouse=True)
def versions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "describe_versions", describe_once)

"""The rules are checked after every pass in these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _rules(rules_after_every_pass: None) -> None:
    """Take the fixture for every test of this folder."""

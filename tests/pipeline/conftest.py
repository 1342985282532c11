"""Verify programs after every pass in these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _rules(rules_after_every_pass: None) -> None:
    """Apply the fixture to every test of this folder."""

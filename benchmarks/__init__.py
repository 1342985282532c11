"""Measurements. Programs are compiled where that is measured, not found: what keeps them is switched off."""

import os

os.environ.setdefault("GRAPHSHARD_CACHE", "off")

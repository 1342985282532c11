"""Measurements. The compile cache is off, so that compilation is measured and not the cache."""

import os

os.environ.setdefault("GRAPHSHARD_CACHE", "off")

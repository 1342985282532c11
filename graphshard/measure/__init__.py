"""Measure this machine, and the regions of a compiled model on it."""

"""Opt-in passes: they change numbers, and only `Pipeline.insert` puts them into a pipeline."""

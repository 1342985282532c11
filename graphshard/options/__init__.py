"""The arguments of `compile`, checked once and turned into a parameter table and a pipeline."""

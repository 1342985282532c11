"""Predict a training step without the machine: studies, results, advice, formulas."""

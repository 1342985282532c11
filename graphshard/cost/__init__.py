"""Seconds and bytes of operators, collectives and copies on a machine; profiles of machines."""

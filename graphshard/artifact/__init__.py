"""Compiled ahead of time: `.gshard` and `.pt2` files, what they must fit, and how they are loaded."""

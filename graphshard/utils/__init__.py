"""Utilities that do not depend on programs: text, progress, argument checks, source lines, readable files."""

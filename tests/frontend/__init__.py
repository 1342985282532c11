"""Tests of `graphshard/frontend`."""

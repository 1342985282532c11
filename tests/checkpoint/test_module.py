"""`graphshard.checkpoint` is a public module."""

import graphshard


def test_it_has_the_functions_of_the_package() -> None:
    for name in graphshard.checkpoint.__all__:
        assert getattr(graphshard.checkpoint, name) is getattr(graphshard, name)

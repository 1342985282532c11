"""FSDP2's settings that a compiled module has no use for, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from graphshard.ir.errors import UnsupportedError

_PASS = "Collectives are nodes of the graph: write a pass that changes them (examples/write_a_pass.py) for passes="


class Unsupported:
    """Methods of FSDP2's modules that raise UnsupportedError here, or that have nothing to do."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing to do: backward gathers only what it reads."""

    def set_reduce_scatter_unused_params(self, *_: Any, **__: Any) -> None:
        """Nothing to do: every rank runs the same reductions, whichever parameters a step uses."""

    def set_all_reduce_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse("set_all_reduce_hook", f"{_PASS}, after 'insert-collectives'.")

    def set_custom_all_gather(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse("set_custom_all_gather", f"{_PASS}, after 'reorder'.")

    def set_custom_reduce_scatter(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse("set_custom_reduce_scatter", f"{_PASS}, after 'reorder'.")

    def set_separate_reduce_scatter_group(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse("set_separate_reduce_scatter_group", "The plan orders gathers and reductions of one group.")

    def set_reduce_scatter_max_input_buffers(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse("set_reduce_scatter_max_input_buffers", "The plan bounds memory: compile with memory_limit=<bytes>.")

    def set_allocate_memory_from_process_group_for_comm(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse(
            "set_allocate_memory_from_process_group_for_comm",
            "Large tensors are sent from where they are, so there are no buffers of their own to allocate.",
        )

    def set_symm_mem_for_comm(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse(
            "set_symm_mem_for_comm",
            "Large tensors are sent from where they are, so there are no buffers of their own to allocate.",
        )

    def set_post_optim_event(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse(
            "set_post_optim_event",
            "Gathers start after what the current stream was given before: let it wait for the event "
            "(torch.cuda.current_stream().wait_event(event)) before the next call.",
        )


def _refuse(name: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{name} is not supported by graphshard. {instead}")

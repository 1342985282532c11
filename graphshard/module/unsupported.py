"""FSDP2's settings that a compiled module has no use for, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from graphshard.ir.errors import UnsupportedError


class Unsupported:
    """Methods of FSDP2's modules that raise UnsupportedError here, or that have nothing to do."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing to do: backward gathers only what it reads."""

    def set_reduce_scatter_unused_params(self, *_: Any, **__: Any) -> None:
        """Nothing to do: every rank runs the same reductions, whichever parameters a step uses."""

    def set_keep_unsharded_storage(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        _refuse(
            "set_keep_unsharded_storage",
            "Programs make what they gather anew. set_reshard_after_backward(False) keeps it over microbatches.",
        )

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


def _refuse(name: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{name} is not supported by graphshard. {instead}")

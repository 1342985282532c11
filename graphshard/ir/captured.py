"""What was captured, of a program that passes have rewritten since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphshard.errors import ArgumentError


class Captured:
    """Base of `Program`: makes the captured program again when it is asked for."""

    def keep_captured(self, captured: Callable[[], Any]) -> None:
        """Remember how to make the program again that was captured, as an `ExportedProgram`."""
        self.__dict__["_captured"] = captured

    @property
    def exported(self) -> Any:
        """The captured program, before all passes, as an `ExportedProgram` of torch with a joint signature.

        Its outputs are BUFFER_MUTATION, USER_OUTPUT, GRADIENT_TO_PARAMETER and GRADIENT_TO_USER_INPUT; tangents are
        user inputs. It holds no weights. `torch.export.save` writes it, and `graphshard.compile` takes it.

        A program of the cache, and one of a few equal blocks that stand for all, is captured once more for this.

        Raises:
            ArgumentError: the program is of a file of `graphshard.export`, or the model is in another mode now.
            UnsupportedError: the program takes or returns what torch has no signature for.
        """
        if "_captured" not in self.__dict__:
            title = getattr(self, "title", "")
            raise ArgumentError(
                f"exported: the program {title} was read from a file of graphshard.export, and what was captured is "
                "not in it. Compile the model, without artifact=, to capture it."
            )
        if "_exported" not in self.__dict__:
            self.__dict__["_exported"] = self.__dict__["_captured"]()
        return self.__dict__["_exported"]

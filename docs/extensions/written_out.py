"""Write the options out in the signatures of functions that take them as `**options: Unpack[...]`.

`graphshard.options.options.takes_options` does the same for `help`; griffe reads the source and does not run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

OPTIONS = "options.options.Options"
# Further dataclasses whose fields to write out, by the name of the keyword arguments.
ALSO = {"ExplainArguments": "predict.training_config.Training"}


class WrittenOut(griffe.Extension):
    """Extension that replaces `**options` with the fields of `Options` and further dataclasses, with defaults."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for function in _functions(pkg):
            known = {parameter.name for parameter in function.parameters}
            annotation = str(function.parameters["options"].annotation)
            del function.parameters["options"]
            also = [name for arguments, name in ALSO.items() if annotation == f"Unpack[{arguments}]"]
            for field in (field for name in (*also, OPTIONS) for field in pkg[name].attributes.values()):
                if field.value is not None and field.name not in known:
                    function.parameters.add(
                        griffe.Parameter(
                            field.name,
                            annotation=field.annotation,
                            kind=griffe.ParameterKind.keyword_only,
                            default=field.value,
                        )
                    )


def _functions(module: griffe.Module) -> Iterator[griffe.Function]:
    """Yield the functions of a package and its modules that take options."""
    for function in module.functions.values():
        if "options" in function.parameters and str(function.parameters["options"].annotation).startswith("Unpack["):
            yield function
    for part in module.modules.values():
        if not part.is_alias:
            yield from _functions(part)

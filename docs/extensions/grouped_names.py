"""Let one line of a docstring describe several parameters: `first, last: what they are`."""

from __future__ import annotations

import re
from typing import Any

import griffe

GROUP = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)


class GroupedNames(griffe.Extension):
    """Extension that gives each name a separate entry with the whole description, which griffe can parse."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = GROUP.sub(_entries, obj.docstring.value)


def _entries(match: re.Match[str]) -> str:
    indent, names, description = match.groups()
    return "\n".join(f"{indent}{name}: {description}" for name in names.split(", "))

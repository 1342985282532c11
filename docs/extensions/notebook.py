"""Show Jupyter notebooks as pages, without running them: text as it is, code as Python blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


class Notebook(File):
    """A notebook, which mkdocs would copy."""

    def __init__(self, file: File) -> None:
        super().__init__(file.src_uri.removesuffix(".ipynb") + ".md", file.src_dir, file.dest_dir, False)
        self.src_uri = file.src_uri

    def is_documentation_page(self) -> bool:
        """Return True, so that mkdocs renders it."""
        return True


def on_files(files: Files, **_: Any) -> Files:
    """Replace notebooks by pages."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file))
    return files


def on_page_read_source(page: Any, **_: Any) -> str | None:
    """Return a notebook's cells as Markdown."""
    if not isinstance(page.file, Notebook):
        return None
    return markdown(Path(page.file.abs_src_path))


def markdown(notebook: Path) -> str:
    """Return the text and code of a notebook as Markdown."""
    blocks = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        blocks.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(blocks)

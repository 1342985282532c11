"""Every code block of the README and the manual, run: Python on two ranks, commands as far as a test can.

<!--- invisible-code-block: python     a hidden block: setup of the next one
```python                              runs on two gloo ranks, page by page, in one namespace
```output                              output of the preceding Python block; "..." stands for any text
```error                               the error that the preceding Python block raises
```diff                                both sides run, each on a copy of `model`
```sh                                  `graphshard` commands run in the page's directory; the arguments of others
                                       are parsed by their script
```text                                a picture or a measurement; nothing to run
"""

from __future__ import annotations

import contextlib
import copy
import doctest
import functools
import io
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser
from sybil.typing import Evaluator
from torch.distributed import fsdp

import graphshard
from graphshard.errors import GraphshardError
from tests.docs.commands import commands_of, run_command
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
LANGUAGES = ("python", "output", "error", "diff", "sh", "text")


def parse(page: str, **evaluators: Evaluator) -> Document:
    """Parse a page and its code blocks, including hidden ones, with evaluators by language."""
    return Document.parse(str(ROOT / page), *(CodeBlockParser(*pair) for pair in evaluators.items()))


class PythonBlocks:
    """Evaluators of a page's Python, output and diff blocks."""

    def __init__(self) -> None:
        self.printed = ""
        self.raised: GraphshardError | None = None

    def python(self, block: Example) -> None:
        """Run a block and keep its output or error; also print the output, for the report of a failing test."""
        self.check_errors()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                PythonEvaluator()(block)
            except GraphshardError as error:
                self.raised = error
        self.printed = out.getvalue()
        print(self.printed, end="")

    def output(self, block: Example) -> None:
        assert _same(block.parsed, self.printed), f"{block.path}:{block.line}: it printed\n{self.printed}"

    def error(self, block: Example) -> None:
        assert self.raised is not None, f"{block.path}:{block.line}: the block before it raises nothing"
        name, raised = type(self.raised).__name__.replace("GraphBreak", "CaptureError"), self.raised
        assert _same(block.parsed, f"{name}: {raised}"), f"{block.path}:{block.line}: it raises {name}: {raised}"
        self.raised = None

    def check_errors(self) -> None:
        """Raise the last error unless an error block shows it."""
        if self.raised is not None:
            raise self.raised

    def diff(self, block: Example) -> None:
        """Run the removed and the added lines, each with a copy of the model."""
        for other in "+-":
            kept = [line[1:] for line in block.parsed.splitlines() if not line.startswith(other)]
            namespace = block.namespace | {"model": copy.deepcopy(block.namespace["model"])}
            exec(compile("\n".join(kept), f"{block.path}:{block.line}", "exec"), namespace)


def _same(shown: str, found: str) -> bool:
    """Return whether texts are equal, with "..." for any text and without spaces at the ends of lines."""
    want, got = ("".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines()) for text in (shown, found))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def run_python(rank: int, world_size: int, page: str, folder: str, backend: str) -> None:
    """Run a page's Python blocks on this rank, with files in `folder`."""
    blocks = PythonBlocks()
    document = parse(page, python=blocks.python, output=blocks.output, error=blocks.error, diff=blocks.diff)
    module = types.ModuleType("page")  # classes of a page need an importable module
    document.namespace = module.__dict__
    with _inside(folder), _compiled_with(backend), _importable(module):
        for example in document.examples():
            example.evaluate()
        blocks.check_errors()
        dist.barrier()


@contextlib.contextmanager
def _importable(page: types.ModuleType) -> Iterator[None]:
    """Make a page importable as a module; its imports stay, because operator libraries cannot be imported twice."""
    sys.modules["page"] = page
    try:
        yield
    finally:
        del sys.modules["page"]


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Change to a directory, and make the examples importable."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
            yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _compiled_with(backend: str) -> Iterator[None]:
    """Replace the default backend: pages show defaults, and are not about lowering."""
    with contextlib.ExitStack() as stack:
        for name in ("compile", "export"):
            given = getattr(graphshard, name)
            function = functools.update_wrapper(functools.partial(given, backend=backend), given)
            stack.enter_context(mock.patch.object(graphshard, name, function))
            if name == "compile":
                stack.enter_context(mock.patch("graphshard.integrations.accelerate.compile", function))
        yield


def _nothing(block: Example) -> None:
    """Do nothing; used to list the blocks."""


def _commands(block: Example) -> None:
    for command in commands_of(block.parsed):
        run_command(command)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.quick_cases(
    "README.md",
    "docs/evidence/gpu.md",
    "docs/evidence/performance.md",
    "docs/evidence/robustness.md",
    "docs/evidence/tests.md",
    "docs/evidence/transformers.md",
    "docs/evidence/upstream.md",
    "docs/explanation/how_it_is_built.md",
    "docs/explanation/how_it_works.md",
    "docs/explanation/reliability.md",
    "docs/get_started/from_ddp.md",
    "docs/get_started/from_fsdp2.md",
    "docs/get_started/install.md",
    "docs/how_to/cache.md",
    "docs/how_to/compile_step.md",
    "docs/how_to/debug.md",
    "docs/how_to/explain.md",
    "docs/how_to/export.md",
    "docs/how_to/faq.md",
    "docs/how_to/foreign_graphs.md",
    "docs/how_to/throughput.md",
    "docs/how_to/train.md",
    "docs/index.md",
    "docs/integrations/examples.md",
    "docs/integrations/nodes.md",
    "docs/integrations/ray.md",
    "docs/integrations/safetensors.md",
    "docs/integrations/torchao.md",
    "docs/integrations/torchft.md",
    "docs/integrations/torchtitan.md",
    "docs/reference/cli.md",
    "docs/reference/environment.md",
    "docs/reference/errors.md",
    "docs/reference/functions.md",
    "docs/reference/limitations.md",
    "docs/reference/objects.md",
    "docs/reference/passes.md",
    "docs/reference/planners.md",
    "docs/reference/vocabulary.md",
)
def test_page(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """All blocks of a page run, with the eager backend."""
    if page == "docs/how_to/parallelism.md" and not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("torch 2.11 has no DataParallelMeshDims")
    if list(parse(page, python=_nothing, diff=_nothing)):
        ranks(2).run(run_python, page, str(tmp_path), "eager")
    monkeypatch.chdir(tmp_path)
    for example in parse(page, sh=_commands):
        example.evaluate()


@pytest.mark.slow
def test_readme_with_inductor(ranks: Ranks, tmp_path: Path) -> None:
    """The first page as its reader runs it."""
    ranks(2).run(run_python, "README.md", str(tmp_path), "inductor")


def test_first_block_of_the_readme_runs_when_pasted() -> None:
    """`test_page` runs it; nothing hidden may help it."""
    text = (ROOT / "README.md").read_text()
    before, _, block = text.partition("```python\n")
    assert "invisible-code-block" not in before
    assert len(block.partition("```")[0].splitlines()) <= 30


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run(page: str) -> None:
    """No test would run a fence without a language, or with an unknown one."""
    text = (ROOT / page).read_text()
    opened = re.findall(r"^ *(?:```|~~~)(.*)$", text, re.MULTILINE)[::2]
    assert set(opened) <= set(LANGUAGES), opened
    hidden = text.count("<!--- invisible-code-block: python\n")
    assert hidden == text.count("invisible-code-block")
    assert len(list(parse(page, **dict.fromkeys(LANGUAGES, _nothing)))) == len(opened) + hidden


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_exist(page: str) -> None:
    """Relative to the page. Included parts are read from a second location, so they have no relative links."""
    text = re.sub("`[^`\n]*`", "", (ROOT / page).read_text())  # code may look like a link
    shared = "".join(re.findall(r"8<-- \[start:\w+\].*?8<-- \[end:\w+\]", text, re.DOTALL))
    links = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
    for link in links.findall(text):
        assert ((ROOT / page).parent / link).exists(), link
    assert not links.findall(shared)

"""Modules named with quotes, line breaks, NUL, HTML or 10,000 characters are handled safely."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.cli.main import main
from graphshard.errors import ArgumentError
from tests.ranks import FakeWorld

INPUTS = (torch.ones(3, 4),)
NAMES = {
    "quotes": "a'b\"c\"\"\"d'''e\\",
    "line break": "a\nimport os; os.abort()\n#",
    "carriage return": "a\rb\u2028c",
    "NUL": "a\0b",
    "escape": "\x1b[31m\x1b]0;title\x07",
    "html": "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;{{ 7 * 7 }}{% raw %}",
    "path": "../../../../tmp/evil/..",
    "long": "x" * 10_000,
    "format": "{0}%s%n{x!r}$HOME`id`",
    "other script": "層\u202e\u0301",
    "half a character": "\ud800",
    "keyword": "class",
    "empty part": " ",
}


class Named(nn.Module):
    """Two layers under a name, and one that is called directly."""

    def __init__(self, name: str) -> None:
        super().__init__()
        name = name.replace(".", "/")  # not allowed in names of modules
        self.blocks = nn.ModuleDict({name: nn.Linear(4, 4), f"{name}2": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x).relu()
        return x.sum()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.quick_cases("half a character", "empty part")
def test_a_name_is_captured_and_dumped(
    name: str, fake_world: FakeWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files are complete and contain the name only as text; a submodule is also called."""
    fake_world(2)
    dump = tmp_path / "inside" / "dump"
    try:
        model = graphshard.compile(Named(name), init_device_mesh("cpu", (2,)), backend="eager", dump=dump)
        model(*INPUTS).backward()
        next(iter(model.blocks.values()))(*INPUTS).sum().backward()
    except ArgumentError:
        if "\ud800" not in name:
            raise
        return
    assert len(graphshard.programs(model)) >= 2
    written = files(tmp_path)
    assert all(path.is_relative_to(dump / "rank0") for path in written)
    assert len([path for path in written if path.name == "index.html"]) >= 2
    for path in written:
        assert re.fullmatch(r"[\w.~-]+", path.name), path
        assert path.parent.name.isprintable()
        if path.suffix == ".pt2":  # torch's zip format
            continue
        text = path.read_bytes().decode()
        if path.suffix == ".py":
            calls = [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
            assert "abort" not in calls, path
        if path.suffix == ".json":
            json.loads(text)
        if path.suffix == ".html":
            assert "<script>alert" not in text
            assert "<img src=x" not in text
            assert "49" not in re.findall(r"\{\{.*?\}\}", text)
    for stage in dump.rglob("*.json"):
        if re.match(r"\d\d-", stage.name):
            main(["show", str(stage), "--full"])
            main(["repro", str(stage)])
    main(["show", str(dump)])
    main(["show", str(next(dump.rglob("summary.json")).parent)])
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said
    assert "\0" not in said
    assert "\x07" not in said


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.quick_cases("half a character")
def test_a_name_is_predicted_and_exported(name: str, fake_world: FakeWorld, tmp_path: Path) -> None:
    path = tmp_path / "a.gshard"
    if "\ud800" in name:
        for function in (graphshard.explain, functools.partial(graphshard.export, path=path)):
            with pytest.raises(ArgumentError, match="has a character that no file takes"):
                function(Named(name), mesh=(2,), example_inputs=INPUTS)
        return
    found = graphshard.explain(Named(name), (2,), example_inputs=INPUTS)
    found.save_html(tmp_path / "a.html")
    found.save_trace(tmp_path / "a.trace")
    json.loads((tmp_path / "a.trace").read_text())
    assert "<script>alert" not in (tmp_path / "a.html").read_text()
    graphshard.export(Named(name), (2,), path, example_inputs=INPUTS, backend="eager")
    fake_world(2)
    graphshard.load(path, Named(name), init_device_mesh("cpu", (2,)))(*INPUTS).backward()

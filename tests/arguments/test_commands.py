"""For any arguments the command `graphshard` prints one line that names them, without control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

import graphshard
from graphshard.cli.main import main
from graphshard.pipeline.pipeline import Pipeline
from tests.arguments.malformed import ESCAPES, LONG
from tests.arguments.table import INPUTS
from tests.debug.test_repro import write_dump
from tests.helpers import Blocks

Capture = pytest.CaptureFixture[str]
MODEL = "tests.helpers:Tied"
EXPLAIN = ("explain", MODEL, "--mesh", "2", "--batch", "3,4")
PATHS = ("", "a\0b", LONG, "/nowhere/at/all", "/dev/zero", "/dev/null", ESCAPES, "FIFO", "SPARSE", "DIRECTORY")
# Invalid values by option, and the name in the error.
OPTIONS: dict[str, tuple[Sequence[str], str]] = {
    "--mesh": (("", "x", "0", "-1", "1,2,3", "a=", "=2", "a=2,a=2", "²", "9" * 30, "9" * 5000, ESCAPES, LONG), "mesh"),
    "--batch": (("", "x", "0", "3,", "3,-1", "²", "9" * 10, "9" * 5000, ESCAPES), "batch|inputs"),
    "--inputs": (("0", "-1", "x", "1.5", "9" * 10, "2"), "inputs"),
    "--hardware": (PATHS, "hardware"),
    "--network": (("", "nope", LONG, ESCAPES), "network"),
    "--param-dtype": (("nope", "nn", "int32", ESCAPES, LONG), "dtype"),
    "--reduce-dtype": (("nope", "bool", ESCAPES), "dtype"),
    "--reshard": (("sometimes", "-1", "3", "²", "9" * 30, "9" * 5000, ESCAPES), "reshard"),
    "--units": (("nope", "", ESCAPES, LONG), "units"),
    "--activation": (("some", "2", "1.2.3", "²", "aten.mm", "aten.", ".", "9" * 400, ESCAPES, LONG), "activation"),
    "--backend": (("cuda", ""), "backend"),
    "--dynamic": (("x", "9", "9" * 30), "dynamic"),
    "--optimizer-states": (("-1", "x", "9" * 30), "optimizer.states"),
    "--memory-limit": (("0", "-1", "x"), "memory.limit"),
    "--accumulate": (("0", "-1", "x", "9" * 30), "accumulate"),
    "--pipeline": (("", "zigzag"), "pipeline"),
    "--stages-per-rank": (("0", "-1", "x", "9" * 30), "stages.per.rank"),
    "--degrees": (("", "pp", "=2", "pp=", "pp=0", "pp=x", "x=2", "pp=4", "pp=" + "9" * 5000, ESCAPES), "degrees"),
    "--clip-norm": (("0", "-1", "x", "nan", "inf"), "clip.norm"),
    "--tokens": (("0", "-1", "x", "nan", "inf"), "tokens"),
    "--price": (("0", "-1", "x", "nan", "2.5"), "price"),
    "--what-if": (("", "nope", "bath", ESCAPES, LONG), "what.if"),
    "--ranks": (("0", "x", "8"), "ranks"),
    "--measured": (PATHS, "measured"),
    "--symbols": (("batch", "=0", "b c=0", "b=x", "b=²", "b=9", "b=" + "9" * 5000, ESCAPES), "symbols"),
    "--json": (("", "a\0b", LONG, "/dev/null/x", "DIRECTORY"), "json"),
    "--html": (("", "a\0b", LONG, "/dev/null/x"), "html|path"),
    "--trace": (("", "a\0b", LONG, "/dev/null/x"), "trace|path"),
}
FACTORIES = ("", ":", "x", "x:", ":x", "no.such:x", "..:x", f"{LONG}:x", "a\0b:x", "os:nope", "os:sep", f"{ESCAPES}:x")
SOURCES = {
    "syntax": "def model(:\n",
    "raises": "raise KeyError('at import')\n",
    "exits": "raise SystemExit(3)\n",
    "null": "\0",
    "fails": "def model():\n    return {}['nothing']\n",
    "other": "def model():\n    return 3\n",
    "inputs": "import tests.helpers\ndef model():\n    return tests.helpers.Blocks(), 3\n",
    "arguments": "def model(size):\n    return size\n",
}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Create the paths in the table: a FIFO, a file too long to read, and a directory."""
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(200 << 30)
    return {"FIFO": str(tmp_path / "fifo"), "SPARSE": str(tmp_path / "sparse"), "DIRECTORY": str(tmp_path)}


def fault_of(capsys: Capture, argv: Sequence[str], named: str) -> str:
    """Return the fault of a command's failure, or ""."""
    try:
        status = main(argv)
    except SystemExit as error:  # from argparse
        status = int(error.code or 0)
    except BaseException as error:
        return f"{argv}: raw {type(error).__name__}: {str(error)[:200]}"
    out, err = capsys.readouterr()
    said = (out + err).lower()
    if "\x1b" in out + err:
        return f"{argv}: an escape"
    if status == 0 or not said or len(said) > 5000:
        return f"{argv}: status {status}, {len(said)} characters: {said[:200]}"
    return "" if re.search(named, said) else f"{argv}: {said}"


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_explain(capsys: Capture, paths: dict[str, str], option: str) -> None:
    """Argparse's message is accepted, too."""
    values, named = OPTIONS[option]
    faults = [fault_of(capsys, [*EXPLAIN, option, paths.get(value, value)], named) for value in values]
    assert not [fault for fault in faults if fault]


def test_factories(capsys: Capture, tmp_path: Path) -> None:
    """Missing factories, and files with each kind of error; the message shows the error."""
    for name, source in SOURCES.items():
        (tmp_path / f"{name}_model.py").write_text(source)
    files = [f"{tmp_path}/{name}_model.py:model" for name in SOURCES]
    named = "factory|model|has no function|there is no file"
    rest = ("--mesh", "2", "--batch", "3,4")
    faults = [fault_of(capsys, ["explain", factory, *rest], named) for factory in (*FACTORIES, *files)]
    assert not [fault for fault in faults if fault]
    main(["explain", files[0], *rest])
    assert "cannot be imported: SyntaxError: invalid syntax (syntax_model.py, line 1)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "diff", "repro", "verify", "finish"])
def test_paths(capsys: Capture, paths: dict[str, str], command: str) -> None:
    """With and without a file name suffix."""
    argv = [command, *([paths["DIRECTORY"]] if command == "diff" else [])]
    faults = []
    for value in PATHS:
        path = paths.get(value, value)
        for ending in ("", ".txt", ".json", ".gshard"):
            if ending and path in paths.values():
                linked = Path(f"{path}{ending}")
                linked.symlink_to(path)
                faults.append(fault_of(capsys, [*argv, str(linked)], ""))
            else:
                faults.append(fault_of(capsys, [*argv, f"{path}{ending}"], ""))
    assert not [fault for fault in faults if fault]


def test_other_arguments(capsys: Capture, tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump", Pipeline())
    stage = str(dump / "00-capture.json")
    file = graphshard.export(Blocks(1), (1,), tmp_path / "a.gshard", compile_regions=False, example_inputs=INPUTS)
    calls = [
        *(["repro", stage, "--pass", name] for name in ("", "nope", ":", "os:", "os:path", "os:nope", LONG, ESCAPES)),
        *(["repro", stage, "--import", name] for name in ("", ".", "..x", "no.such", "a\0b", LONG, ESCAPES)),
        *(["show", stage, "--import", name] for name in ("", "no.such", ESCAPES)),
        *(["finish", str(file), "--threads", number] for number in ("0", "-1", "x", "9" * 30)),
        *(["calibrate", "--out", path] for path in ("", "a\0b", LONG, str(tmp_path))),
        *(["calibrate", "--out", "x.json", "--ranks", number] for number in ("0", "-1", "x", "9" * 30)),
        ["show", stage, "--graph"],
        ["diff", stage],
        ["diff", stage, stage, "--previous"],
        [],
        ["nope"],
    ]
    with mock.patch("subprocess.run", side_effect=AssertionError("ranks are started")):
        faults = [fault_of(capsys, argv, "") for argv in calls if argv]
    assert not [fault for fault in faults if fault]

"""The command `graphshard`: its output and its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import get_args

import pytest

import graphshard
from graphshard.cli.main import BACKENDS, SCHEDULES, main
from graphshard.codec.program_format import program_from_json
from graphshard.debug._dump_summary import DumpSummary
from graphshard.ir.collapse_repeats import fold
from graphshard.ir.printer import print_program
from graphshard.lower.backends import Backend
from graphshard.pipeline.pipeline import Pipeline
from graphshard.schedule.stages import PIPELINE_SCHEDULES
from graphshard.utils.json_dataclasses import write
from tests.debug.test_repro import copy_stage, write_dump

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dumps") / "Blocks-0", Pipeline())


def fails(capsys: Capture, *argv: str) -> str:
    """Return the one line that a command fails with."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def usage_error(capsys: Capture, *argv: str) -> str:
    """Return the output for wrong arguments."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    return capsys.readouterr().err


# show


@pytest.mark.slow
def test_show_a_stage(dump: Path, capsys: Capture):
    """The original text, or text rebuilt from JSON; folded or in full."""
    program = program_from_json((dump / "09-bucket.json").read_text())
    text = print_program(program)
    assert "... layers" in fold(text)
    for path in ("09-bucket.txt", "09-bucket.json", "09-bucket", "09"):
        assert main(["show", str(dump / path)]) == 0
        assert capsys.readouterr().out == fold(text)
        assert main(["show", str(dump / path), "--full"]) == 0
        assert capsys.readouterr().out == text


def test_show_a_dump(dump: Path, capsys: Capture):
    assert main(["show", str(dump)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "Blocks-0: first call",
        "2 ranks on axis 'shard'",
        "stage pass rewrites nodes seconds numerics",
    ]
    assert re.fullmatch(r"00 capture 0 \d+ 0.500 exact", lines[3])
    assert re.fullmatch(r"10 reorder \d+ \d+ \d\.\d\d\d exact", lines[13])
    assert lines[14:] == [
        "plan: 11 buckets",
        "forward: 4 gather buckets, 320 bytes, the largest 80",
        "backward: 3 gather buckets, 192 bytes, the largest 64",
        "backward: 4 reduce buckets, 320 bytes, the largest 80",
    ]


def test_show_a_dump_that_ended_with_an_error(dump: Path, tmp_path: Path, capsys: Capture):
    summary = json.loads((dump / "summary.json").read_text())
    summary["stages"][1]["exact"] = False
    extra = {"regions": {"calls": 90, "distinct": 14}, "error": "reorder: [plan] is wrong", "torch": "2.13.0"}
    (tmp_path / "summary.json").write_text(json.dumps(summary | extra))
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks on axis 'shard', torch 2.13.0\n" in out
    assert "regions: 90 calls of 14 distinct ones\n" in out
    assert "error: reorder: [plan] is wrong\n" in out
    assert out.count("may change") == 1
    assert "plan:" not in out


def test_show_lists_dumps_newest_first(tmp_path: Path, capsys: Capture):
    for age, name in enumerate(["rank0/new", "rank0/old", "older"]):
        (tmp_path / name).mkdir(parents=True)
        summary = tmp_path / name / "summary.json"
        summary.write_text(json.dumps(write(DumpSummary(title=f"Model-{age}", error="boom\nat line 1"))))
        os.utime(summary, (1_000_000 - age,) * 2)
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"Model-\d", out) == ["Model-0", "Model-1", "Model-2"]
    assert str(tmp_path / "rank0/new") in out
    assert out.count("boom") == 3
    assert "line 1" not in out


def test_show_of_a_dump_that_has_just_started(tmp_path: Path, capsys: Capture):
    (tmp_path / "summary.json").write_text(json.dumps(write(DumpSummary(pid=3))))
    assert main(["show", str(tmp_path)]) == 0


# diff


def test_diff(dump: Path, capsys: Capture):
    """Like diff(1): 0 for equal, 1 for different."""
    a, b = str(dump / "00-capture.txt"), str(dump / "01-insert-collectives.txt")
    assert main(["diff", a, a]) == 0
    assert capsys.readouterr().out == ""
    assert main(["diff", a, b]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"--- {a}\n+++ {b}\n@@ ")
    assert "+* %" in out
    assert "\x1b" not in out


def test_diff_of_text_and_json_of_a_stage_is_empty(dump: Path):
    assert main(["diff", str(dump / "09-bucket.txt"), str(dump / "09-bucket.json")]) == 0
    assert main(["diff", str(dump / "09-bucket.txt"), str(dump / "09-bucket.json"), "--full"]) == 0


def test_diff_with_the_stage_before(dump: Path, capsys: Capture):
    assert main(["diff", str(dump / "01"), "--previous"]) == 1
    assert capsys.readouterr().out.startswith(f"--- {dump / '00-capture.txt'}\n")
    assert "has no stage before it" in fails(capsys, "diff", str(dump / "00"), "--previous")


def test_diff_folds_unless_full(dump: Path, capsys: Capture):
    main(["diff", str(dump / "00"), str(dump / "01")])
    assert "... layers.2 to layers.3: 2 times 2 lines like layers.1" in capsys.readouterr().out
    main(["diff", str(dump / "00"), str(dump / "01"), "--full"])
    assert "... layers" not in capsys.readouterr().out


def test_diff_has_colors_on_a_terminal(dump: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["diff", str(dump / "00"), str(dump / "01")]) == 1
    out = capsys.readouterr().out
    assert "\x1b[32m+* %" in out
    assert "[2, 4]" in out  # brackets are not interpreted as markup


@pytest.mark.parametrize("argv", [["a"], ["a", "b", "--previous"]])
def test_diff_takes_two_stages(argv: list[str], capsys: Capture):
    assert fails(capsys, "diff", *argv) == "graphshard diff: give two stages, or one and --previous\n"


# Errors.


def test_no_such_file(dump: Path, capsys: Capture):
    path = dump / "09-buckt.txt"
    assert fails(capsys, "show", str(path)) == (
        f"graphshard show: no such file: {path}; did you mean {dump / '09-bucket.txt'}?\n"
    )
    assert fails(capsys, "diff", str(dump / "77"), str(path)).endswith(f"no such file: {dump / '77'}\n")
    nowhere = dump / "nowhere" / "09-bucket.txt"
    assert f"no such file: {nowhere} ({nowhere.parent} is no directory)" in fails(capsys, "repro", str(nowhere))


@pytest.mark.parametrize("command", ["show", "diff", "repro"])
def test_a_file_of_another_kind(tmp_path: Path, capsys: Capture, command: str):
    path = tmp_path / "model.pt"
    path.write_bytes(b"PK\x03\x04")
    message = fails(capsys, command, *[str(path)] * (1 + (command == "diff")))
    assert message.endswith(f"{path} is not a stage: give a file NN-name.txt or NN-name.json of a dump\n")


def test_rejects_a_file_other_than_a_text(tmp_path: Path, capsys: Capture):
    (tmp_path / "09-bucket.txt").write_bytes(b"\xff\xfe\x00")
    assert fails(capsys, "show", str(tmp_path / "09")).endswith("09-bucket.txt is not text\n")


@pytest.mark.parametrize("command", ["show", "repro"])
def test_a_truncated_json(dump: Path, tmp_path: Path, capsys: Capture, command: str):
    path = copy_stage(dump, "09-bucket", tmp_path)
    path.write_text(path.read_text()[:500])
    message = fails(capsys, command, str(path))
    assert message.startswith(f"graphshard {command}: {path}: not JSON, cut off perhaps: ")


def test_a_directory_instead_of_a_stage(dump: Path, capsys: Capture):
    message = fails(capsys, "repro", str(dump))
    assert f"{dump} is a directory: give one of its stages, such as {dump / '00-capture.txt'}" in message


def test_a_directory_without_a_dump(tmp_path: Path, capsys: Capture):
    assert f"{tmp_path} holds no dump: there is no summary.json in it or below it" in fails(
        capsys, "show", str(tmp_path)
    )


@pytest.mark.parametrize("text", ["", "[]", '{"stages": [3]}', '{"stages": [{"name": "capture"}]}'])
def test_rejects_an_invalid_summary(tmp_path: Path, capsys: Capture, text: str):
    (tmp_path / "summary.json").write_text(text)
    assert "summary.json is not the summary of a dump" in fails(capsys, "show", str(tmp_path))


def test_an_unknown_command(capsys: Capture):
    assert "invalid choice: 'shwo' (choose from" in usage_error(capsys, "shwo")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shwo", "dump"], "graphshard: error: argument COMMAND: invalid choice: 'shwo'"),
        (["--vesion"], "graphshard: error: unrecognized arguments: --vesion; did you mean '--version' for '--vesion'?"),
        (
            ["show", "dump", "--flul"],
            "graphshard show: error: unrecognized arguments: --flul; did you mean '--full' for",
        ),
        (["explain", "m:f", "--mehs=8"], "required: --mesh; did you mean '--mesh' for '--mehs'?"),
        (["explain", "m:f", "--mesh", "8", "--backend", "egaer"], "did you mean 'eager' for 'egaer'?"),
        (["diff", "a", "--previos", "--fulll"], "for '--previos'?; did you mean '--full' for '--fulll'?"),
        (["finish", "a.gshard", "--thread"], "argument --threads: expected one argument"),
    ],
)
def test_suggests_the_closest_name(capsys: Capture, argv: list[str], message: str):
    """For a subcommand, an option or a value; a prefix of an option counts as the option."""
    assert message in usage_error(capsys, *argv)


def test_suggests_nothing_for_unrelated_names(capsys: Capture):
    for argv in (["quux"], ["show", "dump", "--quux"], ["show", "dump", "--", "--fulll"]):
        assert "did you mean" not in usage_error(capsys, *argv)


def test_choices_match_the_functions():
    """The command does not import them, because this would import torch."""
    assert get_args(Backend) == BACKENDS
    assert PIPELINE_SCHEDULES == SCHEDULES


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["explain", "--help"], ["shwo"]])
def test_commands_without_torch_do_not_import_it(argv: list[str]):
    """It takes seconds, and logging milliseconds; `--version` names the installed version."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print([m for m in ('torch', 'rich', 'logging') if m in sys.modules]))\n"
        f"sys.argv = ['graphshard', *{argv}]\n"
        "runpy.run_module('graphshard', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    *lines, imported = result.stdout.splitlines()
    assert imported == "[]", result.stderr
    assert result.returncode == (2 if argv == ["shwo"] else 0)
    if argv == ["--version"]:
        assert lines == [f"graphshard {graphshard.__version__}, torch {version('torch')}, Python {python_version()}"]


def test_no_command_prints_the_help(capsys: Capture):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert "graphshard.compile(" in out
    assert all(command in out for command in ("show", "diff", "repro"))


@pytest.mark.parametrize("command", ["show", "diff", "repro"])
def test_help_of_a_command(capsys: Capture, command: str):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "--full" in capsys.readouterr().out


@pytest.mark.slow
def test_as_a_module_with_a_reader_that_stops(dump: Path):
    """`python -m graphshard show ... | head -1` ends without a traceback."""
    command = f"{sys.executable} -m graphshard show {dump / '08'} --full | head -1"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("forward:\n", "")


def test_show_and_diff_do_not_import_torch(dump: Path):
    """They read text; only a program that is made again needs torch."""
    commands = [["show", str(dump)], ["show", str(dump.parent)], ["show", str(dump / "09")]]
    commands.append(["diff", str(dump / "10-reorder.txt"), "--previous"])
    run = f"[main(args) for args in {commands}]; print('torch' in sys.modules)"
    code = f"import sys; from graphshard.cli.main import main; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")

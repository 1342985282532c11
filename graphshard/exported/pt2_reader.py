"""Read `.pt2` files of `torch.export.save` without running what may be hidden in them.

`torch.export.load` trusts its file: it unpickles sample inputs, subclasses and custom objects without restriction,
and evaluates sizes and guards as Python. Here a file is looked at first. `weights_only=True` must be able to load its
pickles, its sizes and guards must be arithmetic, and everything else that runs code is refused.

    model/data/weights/...                  bytes of tensors, or pickles
    model/data/constants/...                the same; pickled objects are refused
    model/data/sample_inputs/model.pt       a pickle
    model/models/model.json                 the graph: operators by name, sizes and guards as text
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from graphshard.errors import ArgumentError, visible
from graphshard.utils.argument_validation import path_of
from graphshard.utils.text import brief

# Of messages that torch writes while it loads a file.
_LOADERS = ("torch.export", "torch._export", "torch.export.pt2_archive._package")
# Functions in a size, as sympy prints it: `Mul(Integer(2), Symbol('s0', positive=True, integer=True))`.
_OF_SIZES = frozenset(
    name
    for line in (
        "Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge",
        "GreaterThan Gt Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min",
        "Mod ModularIndexing Mul Ne Not Or Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt",
        "StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where ceiling floor",
    )
    for name in line.split()
)
# Functions and attributes in a guard, such as `L['x'].size()[0] <= Max(64, L['y'].size()[1])`.
_OF_GUARDS = _OF_SIZES | {"max", "min", "abs", "len", "float", "int"}
_ATTRIBUTES = frozenset({"size", "stride", "storage_offset", "shape", "dtype", "device"})
_SYNTAX = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.keyword),
    *(ast.Subscript, ast.Attribute, ast.Call, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
)
_WORD = re.compile(r"[A-Za-z0-9_.+\-]*")


def read_program(path: Any) -> ExportedProgram:
    """Load a program that `torch.export.save` wrote.

    Raises:
        ArgumentError: there is no such file, or it is not one, or it holds code.
    """
    file = path_of("model", path, "a module, an ExportedProgram or a .pt2 file")
    shown = brief(str(path))
    if not file.is_file():
        raise ArgumentError(
            f"model: there is no file {shown}. Give a module, an ExportedProgram, or the path of a file that "
            "torch.export.save wrote."
        )
    _check_archive(file, shown)
    with _quietly() as said:
        try:
            return torch.export.load(file)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            why = visible(next(iter(said)), lines=False)[:300]
            raise ArgumentError(
                f"model: {shown} cannot be loaded with torch {torch.__version__}{_version_in(file)}: {why}. Export the "
                "module with this release of torch."
            ) from error


def _check_archive(file: Path, shown: str) -> None:
    """Raise ArgumentError unless a file is a program that can be loaded without running code of the file."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError):
        raise ArgumentError(f"model: {shown} is not a .pt2 file. Give a file that torch.export.save wrote.") from None
    with archive:
        inside = {name.partition("/")[2]: name for name in archive.namelist()}
        graphs = [name for name in inside if name.startswith("models/") and name.endswith(".json")]
        if any(name.startswith("data/aotinductor/") for name in inside):
            raise ArgumentError(
                f"model: {shown} was made by AOTInductor: it holds compiled code for inference. Give the file that "
                "torch.export.save wrote of the exported module, before it was compiled."
            )
        if "serialized_exported_program.json" in archive.namelist():
            raise ArgumentError(
                f"model: {shown} is of a format of torch 2.7 and before. Export the module with torch "
                f"{torch.__version__}."
            )
        if graphs != ["models/model.json"] or "archive_format" not in inside:
            raise ArgumentError(
                f"model: {shown} is not a .pt2 file of torch.export.save: it holds {brief(sorted(inside)[:5])}. Give "
                "one that does."
            )
        try:
            _check_members(archive, inside, shown)
        except (ValueError, KeyError, RecursionError, zipfile.BadZipFile, NotImplementedError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"model: {shown} is damaged: {visible(str(error), lines=False)[:200]}. Save it again."
            ) from None


def _check_members(archive: zipfile.ZipFile, inside: dict[str, str], shown: str) -> None:
    program = json.loads(archive.read(inside["models/model.json"]))
    for text in _texts(program, "expr_str"):
        if not _is_arithmetic(text, _OF_SIZES):
            raise _holds_code(shown, f"the size {brief(text)}")
    for text in program.get("guards_code") or ():
        if not _is_arithmetic(text, _OF_GUARDS, _ATTRIBUTES):
            raise _holds_code(shown, f"the condition {brief(text)}")
    for name, member in inside.items():
        folder, _, last = name.rpartition("/")
        if folder == "data/constants" and last.startswith(("custom_obj_", "opaque_obj_")):
            raise _holds_code(shown, f"the pickled object {name}")
        if name.endswith(".pt"):
            _check_pickle(archive.read(member), name, shown)
    for kind in ("weights", "constants"):
        config = inside.get(f"data/{kind}/model_{kind}_config.json")
        entries = json.loads(archive.read(config))["config"] if config else {}
        for entry in entries.values():
            if entry.get("use_pickle"):
                name = f"data/{kind}/{entry['path_name']}"
                _check_pickle(archive.read(inside[name]), name, shown)


def _check_pickle(data: bytes, name: str, shown: str) -> None:
    """Raise ArgumentError for a pickle that holds more than tensors, numbers, texts and containers of them."""
    if not data:
        return
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:
        raise _holds_code(shown, f"{name}, a pickle of more than tensors and plain values") from None


def _holds_code(shown: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"model: {shown} holds {what}, which loading would run as code. If you trust the file, load it yourself and "
        "give what torch.export.load returns."
    )


def _texts(value: Any, key: str) -> Iterator[str]:
    """All texts under a key, at any depth."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            if isinstance(found.get(key), str):
                yield found[key]
            todo += found.values()
        elif isinstance(found, list):
            todo += found


def _is_arithmetic(text: Any, functions: Collection[str], attributes: Collection[str] = ()) -> bool:
    """Return whether a text is an expression of these functions and attributes, numbers and names."""
    try:
        tree = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _SYNTAX) and _is_known(node, functions, attributes) for node in tree)


def _is_known(node: ast.AST, functions: Collection[str], attributes: Collection[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in attributes
    if isinstance(node, ast.Subscript):
        return bool(attributes)
    if isinstance(node, ast.Constant):  # sympy evaluates texts again
        return not isinstance(node.value, (str, bytes)) or bool(attributes) or bool(_WORD.fullmatch(str(node.value)))
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in functions
        return named or isinstance(node.func, ast.Attribute)
    return True


def _version_in(file: Path) -> str:
    with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/models/model.json"))
        version = json.loads(archive.read(name)).get("torch_version")
        if isinstance(version, str):
            return f" (it was saved with torch {visible(version, lines=False)[:40]})"
    return ""


@contextlib.contextmanager
def _quietly() -> Iterator[list[str]]:
    """Keep what torch logs while it loads: an error of its loader is logged, and raised as another one."""
    said: list[str] = []

    class Keep(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.exc_info and isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
                said.append(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}")
            return False

    keep, loggers = Keep(), list(map(logging.getLogger, _LOADERS))
    for logger in loggers:
        logger.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*writable.*|.*deprecated.*")
            yield said
    finally:
        for logger in loggers:
            logger.removeFilter(keep)

"""The module of an exported program, or of a `.pt2` file, that is given in place of a module.

A joint program, such as `graphshard.programs(model)[0].exported`, becomes a `JointModule`: parameters and buffers, and
no forward. What runs is the joint graph, which the tracer takes from it (`codec/joint_export.py`).

`torch.export.load` trusts its file: it unpickles sample inputs, subclasses and custom objects without restriction,
and evaluates sizes and guards as Python. Here a file is looked at first. `weights_only=True` must be able to load its
pickles, its sizes and guards must be arithmetic, and everything else that runs code is refused.

    model/data/weights/...  constants/...   bytes of tensors, or pickles; pickled objects are refused
    model/data/sample_inputs/model.pt       a pickle
    model/models/model.json                 the graph: operators by name, sizes and guards as text
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from graphshard.errors import ArgumentError, UnsupportedError, visible
from graphshard.exported.program_module import HOME, module_from, state_of
from graphshard.utils.argument_validation import path_of
from graphshard.utils.text import brief, users_class

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
    """Load a program that `torch.export.save` wrote; raise ArgumentError if there is none, or if it holds code."""
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
        except ArgumentError:
            raise
        except Exception as error:  # damage and odd contents raise many kinds
            raise ArgumentError(
                f"model: {shown} is damaged: {visible(str(error), lines=False)[:200]}. Save it again."
            ) from None


def _check_members(archive: zipfile.ZipFile, inside: dict[str, str], shown: str) -> None:
    sizes = []

    def collect(found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(found.get("expr_str"), str):
            sizes.append(found["expr_str"])
        return found

    program = json.loads(archive.read(inside["models/model.json"]), object_hook=collect)
    for text in sizes:
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

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            said.append(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}")
        return False

    loggers = list(map(logging.getLogger, _LOADERS))
    for logger in loggers:
        logger.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*writable.*|.*deprecated.*")
            yield said
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


# Class of the module that `graphshard.export` exports to a .pt2 file.
_OF_INFERENCE = "graphshard.aot.exporter._InferenceModule"
_GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT, OutputKind.LOSS_OUTPUT)

# The entry of `meta["custom"]` that holds what graphshard writes into a program.
OURS = "graphshard"
# Names of the inputs of the captured call in a joint program begin with this; the number follows.
INPUT_PREFIX = "input_"


def module_of(model: Any) -> Any:
    """Return the module of an exported program or of a `.pt2` file; anything else as it is.

    Raises:
        ArgumentError: the file cannot be read, the program is not for training, or its state dict does not fit.
        UnsupportedError: the program has something that cannot be called from a module.
    """
    if isinstance(model, (str, os.PathLike)):
        model = read_program(model)
    if not isinstance(model, ExportedProgram):
        return model
    if facts_of(model) is not None or any(spec.kind in _GRADIENTS for spec in model.graph_signature.output_specs):
        return joint_module(model)
    _check_for_training(model)
    return module_from(model)


def _check_for_training(program: ExportedProgram) -> None:
    if program.dialect != "TRAINING":
        raise ArgumentError(
            f"model: the program is of torch.export's dialect {program.dialect}, for inference: run_decompositions() "
            "has taken away the operators that autograd differentiates. Give the program that torch.export.export "
            "returned, and save that to a .pt2 file."
        )
    mutated = [spec for spec in program.graph_signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    if mutated:
        raise ArgumentError(
            f"model: the program returns {mutated[0].target} ({mutated[0].kind.name}), which a program for training "
            "writes in place. Export the module again with torch.export.export."
        )
    kinds = [kind for node in program.graph.nodes for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    if _OF_INFERENCE in kinds:
        raise ArgumentError(
            "model: the program was written by graphshard.export for inference: forward ran in eval() mode and without "
            "gradients. Give the program that torch.export.export makes of the module."
        )


# --- modules of joint programs ------------------------------------------------------------------------------------


class JointModule(nn.Module):
    """Parameters and buffers of a joint program."""

    _joint: ClassVar[ExportedProgram]

    def forward(self, *inputs: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"{users_class(self).__name__} was made of a joint program, which has no forward to run without "
            "graphshard.compile. Call what compile returns, outside of graphshard.uncompiled."
        )

    def train(self, mode: bool = True) -> JointModule:
        """Keep the mode of the capture; raise UnsupportedError for eval()."""
        if not mode:
            raise UnsupportedError(
                f"{users_class(self).__name__} was made of a joint program, which keeps the mode of its capture. "
                "Compile the module in eval() mode instead."
            )
        super().train(mode)
        return self


def joint_module(exported: ExportedProgram) -> JointModule:
    """Make the module of a joint program; raise ArgumentError if it cannot be compiled."""
    facts = facts_of(exported)
    if facts is None:
        raise ArgumentError(
            "model: the program is a joint graph, with gradients among its results, and not one of graphshard's. Give "
            "the program that torch.export.export made of the module."
        )
    why_not = facts.get("why_not")
    if why_not:
        raise ArgumentError(
            f"model: the joint program cannot be compiled from: {why_not}. Compile the module, or the program that "
            "torch.export.export makes of it."
        )
    name = re.sub(r"\W", "_", str(facts.get("model"))) or "JointProgram"
    root: JointModule = type(name, (JointModule,), {"__module__": HOME, "_joint": exported})()
    state = state_of(exported)
    for path, name in facts["stored"].items():
        dtype = getattr(torch, str(name), None)
        if isinstance(dtype, torch.dtype) and path in state.tensors:
            param = state.tensors[path]
            state.tensors[path] = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
    first = {name: names[0] for names in facts["ties"] for name in names}
    for path, tensor in state.tensors.items():
        if path not in state.constants:
            place_tensor(root, path, state.tensors.get(first.get(path, path), tensor))
    return root


def place_tensor(root: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Register a parameter or a buffer under a path, whose modules are made if they are not there."""
    *parts, attribute = path.split(".")
    for part in parts:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(attribute, tensor)
    else:
        root.register_buffer(attribute, tensor)


def joint_of(module: nn.Module) -> ExportedProgram | None:
    """Return the joint program that a module was made of; None for others."""
    return type(module)._joint if isinstance(module, JointModule) else None


def facts_of(exported: ExportedProgram) -> dict[str, Any] | None:
    """Return what graphshard has written into a joint program in addition to its graph; None for others."""
    facts = exported.graph_module.meta.get("custom", {}).get(OURS)
    return facts if isinstance(facts, dict) else None


def joint_inputs(exported: ExportedProgram) -> list[tuple[torch.Size, torch.dtype, bool]]:
    """Return shape, dtype and requires_grad of the inputs of the captured call."""
    specs = exported.graph_signature.output_specs
    trained = {spec.target for spec in specs if spec.kind is OutputKind.GRADIENT_TO_USER_INPUT}
    inputs = [node for node in exported.graph.find_nodes(op="placeholder") if node.name.startswith(INPUT_PREFIX)]
    inputs.sort(key=lambda node: int(node.name.removeprefix(INPUT_PREFIX)))
    return [(node.meta["val"].shape, node.meta["val"].dtype, node.name in trained) for node in inputs]


def wrong_call(expected: Sequence[tuple[torch.Size, torch.dtype, bool]], leaves: Sequence[Any]) -> str:
    """Return how a call differs from the captured one; "" if it does not."""
    if len(leaves) != len(expected) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return f"the inputs are {brief(leaves)}, and {len(expected)} tensors are expected"
    for number, (leaf, (shape, dtype, needs_grad)) in enumerate(zip(leaves, expected)):
        if (leaf.shape, leaf.dtype) != (shape, dtype):
            return f"input {number} is {leaf.dtype}{list(leaf.shape)}, not {dtype}{list(shape)}"
        if leaf.requires_grad != needs_grad:
            return f"input {number} has requires_grad={leaf.requires_grad}"
    return ""

"""Inputs of an exported program: their structure, what was fixed at export, and which sizes may vary.

`torch.export` fixes what is not declared dynamic. A call that differs would compute something else than the module,
so it is an InputError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from graphshard.errors import InputError, UnsupportedError
from graphshard.exported.program_code import is_name
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.text import brief

# Guards of torch.export that sizes say already: two sizes are equal, or a size is a number.
_OF_SIZES = re.compile(r"L(\[[^\]]*\])+\.size\(\)\[\d+\] == (L(\[[^\]]*\])+\.size\(\)\[\d+\]|\d+)")


@dataclass(frozen=True)
class _Leaf:
    """One leaf of the inputs: `value` is its fake tensor, its size as a symbol, or the constant that it was."""

    path: str
    value: Any


@dataclass(frozen=True)
class ProgramInputs:
    """What a program takes and returns.

    Attributes:
        names: of the arguments that were given by position at export, and `keywords` of the others.
        leaves: the leaves of the inputs, in order.
        ranges: smallest and largest value of each dynamic size; None is no limit.
        guards: further conditions on the inputs, as torch.export checks them; None if there are none.
    """

    names: tuple[str, ...]
    keywords: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    leaves: tuple[_Leaf, ...]
    ranges: Mapping[Any, tuple[int, int | None]]
    guards: nn.Module | None

    @classmethod
    def of(cls, program: ExportedProgram) -> ProgramInputs:
        """Read the signature of a program."""
        call = program.module_call_graph[0].signature
        in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        positional, named = in_spec.children()
        keywords = tuple(map(str, named.context))
        names = tuple((call.forward_arg_names if call is not None else None) or ())
        given = names[: positional.num_children]
        if len(given) != positional.num_children or not all(map(is_name, (*given, *keywords))):
            given = tuple(f"arg_{i}" for i in range(positional.num_children))
        if not all(map(is_name, keywords)):
            raise UnsupportedError(f"model: the program takes {brief(keywords)}, which are no names of arguments.")
        specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
        values = [
            spec.arg.value if isinstance(spec.arg, ConstantArgument) else node.meta.get("val")
            for node, spec in specs
            if spec.kind is InputKind.USER_INPUT
        ]
        tree = pytree.tree_unflatten(list(range(len(values))), in_spec)
        paths = [
            "".join([name, *map(str, path)])
            for name, part in zip((*given, *keywords), (*tree[0], *tree[1].values()))
            for path, _ in pytree.tree_flatten_with_path(part)[0]
        ]
        ranges = {symbol: _range(found) for symbol, found in program.range_constraints.items()}
        leaves = tuple(map(_Leaf, paths, values))
        return cls(given, keywords, in_spec, out_spec, leaves, ranges, _guards_of(program))

    @property
    def signature(self) -> str:
        """The arguments of forward, as code."""
        return ", ".join(["self", *self.names, *self.keywords])

    def error(self, model: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InputError | None:
        """Return what is wrong with the inputs of a call; None if the program is for such inputs."""
        given, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            return InputError(
                f"{model}: the inputs have another structure than those that the program was exported for. Given was "
                f"{brief(str(spec))}, expected is {brief(str(self.in_spec))}."
            )
        sizes: dict[Any, Any] = {}
        for leaf, value in zip(self.leaves, given, strict=True):
            wrong = self._wrong(leaf, value, sizes)
            if wrong:
                return InputError(f"{model}: {wrong}")
        try:
            self.check_conditions(given)
        except AssertionError as error:
            return InputError(
                f"{model}: the inputs break a condition that the program was exported under: {error}. Export the "
                "module for such inputs."
            )
        return None

    def check_conditions(self, leaves: Sequence[Any]) -> None:
        """Raise AssertionError if the leaves of inputs break a condition that the program was exported under."""
        if self.guards is not None:
            self.guards(*leaves)

    def _wrong(self, leaf: _Leaf, value: Any, sizes: dict[Any, Any]) -> str:
        """Say what is wrong with a leaf; "" if nothing is."""
        expected, input_ = leaf.value, f"input {leaf.path}"
        if isinstance(expected, torch.SymInt):
            return self._wrong_size(f"{input_} is {_shown(value)}", value, expected, sizes)
        if not isinstance(expected, torch.Tensor):
            if type(value) is type(expected) and value == expected:
                return ""
            return (
                f"{input_} must be {brief(expected)}, which was fixed at export, got {brief(value)}. Export the module "
                "with this value."
            )
        if not isinstance(value, torch.Tensor) or value.dim() != expected.dim():
            shown = f"a tensor of {value.dim()} dims" if isinstance(value, torch.Tensor) else brief(value)
            return f"{input_} must be a tensor of {expected.dim()} dims, as at export, got {shown}."
        if value.dtype != expected.dtype and not (value.is_floating_point() and expected.is_floating_point()):
            return f"{input_} must be of {expected.dtype}, as at export, got {value.dtype}."
        found = (
            self._wrong_size(f"{input_} has size {_shown(size)} in dim {dim}", size, wanted, sizes)
            for dim, (size, wanted) in enumerate(zip(value.shape, expected.shape))
        )
        return next(filter(None, found), "")

    def _wrong_size(self, what: str, size: Any, wanted: Any, sizes: dict[Any, Any]) -> str:
        """Say what is wrong with a size; the first size that is a symbol by itself decides what the symbol is."""
        expression = wanted.node.expr if isinstance(wanted, torch.SymInt) else wanted
        limit = ""
        if isinstance(expression, int) or expression.is_number:
            limit = "" if size == int(expression) else f"and was exported for {expression}"
        elif expression in sizes:
            limit = "" if size == sizes[expression] else "and a dim that had the same size at export has another one"
        elif expression.is_symbol:
            sizes[expression] = size
            low, high = self.ranges.get(expression, (0, None))
            if size < low or (high is not None and size > high):
                limit = f"and was exported for {low} to {'any' if high is None else high}"
        elif isinstance(size, int) and expression.free_symbols <= sizes.keys():
            known = {symbol: sizes[symbol] for symbol in expression.free_symbols}
            if all(isinstance(value, int) for value in known.values()) and size != int(expression.subs(known)):
                limit = f"and was exported for {expression}, which is {expression.subs(known)}"
        return f"{what} {limit}. Export the module with dynamic_shapes that allow this size." if limit else ""

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """Return the sizes that may vary, in torch.export's format; None if there are none."""
        dims: dict[Any, Any] = {}
        for leaf in self.leaves:
            for size in leaf.value.shape if isinstance(leaf.value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.expr not in dims:
                    low, high = self.ranges.get(size.node.expr, (0, None))
                    name = f"size{len(dims)}" if not is_name(str(size)) else str(size)
                    dims[size.node.expr] = Dim(name, min=low, max=high)
        if not dims:
            return None
        entries = [self._entry(leaf.value, dims) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(entries, self.in_spec)
        return {**dict(zip(self.names, args)), **kwargs}

    def _entry(self, value: Any, dims: Mapping[Any, Any]) -> dict[int, Any] | None:
        if not isinstance(value, torch.Tensor):
            return None
        found = {dim: _dim_of(size, dims) for dim, size in enumerate(value.shape)}
        return {dim: what for dim, what in found.items() if what is not None} or None


def _shown(size: Any) -> str:
    """A size for a message; while a program is captured it may be a symbol, of which the user knows nothing."""
    return str(size) if isinstance(size, int) else "n"


def _dim_of(size: Any, dims: Mapping[Any, Any]) -> Any:
    """The `Dim` of a size; one that derives from another is found out while the program is captured."""
    if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
        return None
    return dims.get(size.node.expr, Dim.AUTO)


def _range(found: Any) -> tuple[int, int | None]:
    low, high = (int(end) if getattr(end, "is_Integer", False) else None for end in (found.lower, found.upper))
    return max(low or 0, 0), high if high is not None and high < 1 << 62 else None


def _guards_of(program: ExportedProgram) -> nn.Module | None:
    """The module that checks what sizes do not say, such as that one is larger than another."""
    code = getattr(program, "_guards_code", None) or []
    if all(_OF_SIZES.fullmatch(line) for line in code):
        return None
    module = program.module()
    guards = getattr(module, "_guards_fn", None)
    if guards is None:
        raise UnsupportedError(
            f"model: the program was exported under the condition {brief(code[0])}, which cannot be checked, as the "
            "program has no example inputs. Export the module again, and keep them."
        )
    return guards


def forward_function(inputs: ProgramInputs) -> str:
    """Return the code of a forward with the names of the arguments that the exported module had.

    Dynamo traces the conditions alone, and guards on sizes and dtypes. The rest is checked before a trace.
    """
    args = "".join(f"{name}, " for name in inputs.names)
    kwargs = ", ".join(f"{name!r}: {name}" for name in inputs.keywords)
    given = f"({args}), {{{kwargs}}}"
    return f"""def forward({inputs.signature}):
    if torch.compiler.is_dynamo_compiling():
        self.check_conditions({given})
    else:
        wrong = self.wrong_inputs({given})
        if wrong is not None:
            raise wrong
    return self.run_program({given})
"""

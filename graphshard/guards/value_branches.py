"""Branches on values of inputs: the trace takes one way, and the program is for calls that go this way.

    if mask.all():      trace     answer = True or False, which the values of the traced call say
                        graph     assert_async(mask.all() or its negation)
                        guard     the same condition, computed from the inputs before each call

A function whose branch is known asks `decide` for the answer. The first trace takes the likely way. The conditions that
it leaves in the graph are computed for the inputs of the call, and where the call goes another way, it is traced again
with the answers that were found. The assertion is for programs that run without the guard, as exported ones do.

The functions are transformers'. It makes an explicit attention mask where it is told that it is traced, its eager code
makes none, and gradients differ in the last bit. So its questions are answered as in eager mode while graphshard
traces, through `torch.compiler.substitute_in_graph`; other uses of `torch.compile` hear the truth.

    is_tracing, is_torchdynamo_exporting     no
    fast_all, _ignore_bidirectional_mask     whether a mask has padding: a branch on values
    find_packed_sequence_indices             whether rows are one sequence each: another one
    warn_if_padding_and_no_attention_mask    nothing: values decide over a warning

`is_torchdynamo_compiling` keeps its answer: with another one transformers sets context variables, which Dynamo cannot
trace. It decides over warnings, and over the layout of queries of one token.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from graphshard.guards.value_descriptions import UndescribedError
from graphshard.ir.sizes import expression
from graphshard.torch_compat.torch_ops import assert_async

_BEGIN = "values of inputs decide in forward, and not as in the call that was captured: "

# A method of models of transformers.
WARNING = "warn_if_padding_and_no_attention_mask"
_PACKED = (
    "position_ids have several sequences in a row, or no longer have. Pass an attention_mask of four dims that keeps "
    "the sequences apart."
)
_PADDING = "a mask has padding, or no longer has. Pass a mask of four dims to be independent of its values."


# Names that code of graphs has without modules.
_NAMES_OF_FX = dict[str, Any](torch=torch, device=torch.device, inf=math.inf, nan=math.nan, NoneType=type(None))
_NAMES_OF_FX |= {"fx_pytree": None, "pytree": None}


@dataclass
class _Open:
    """Answers of the trace that is open: known ones in the order of questions, and given ones in this run of forward.

    Without known ones, all branches are left to Dynamo. `depth` is the number of open traces.
    """

    answers: Sequence[bool] | None = None
    given: list[bool] = field(default_factory=list)
    depth: int = 0


_open = _Open()


@dataclass(frozen=True)
class ValueBranches:
    """Conditions on values of inputs that a trace has taken for true.

    Attributes:
        conditions: from the values of `sources` to a vector of booleans.
        sources: expressions that read the inputs, such as L['args'][0].
        answers: of the trace.
    """

    conditions: Callable[..., torch.Tensor]
    sources: tuple[str, ...]
    answers: tuple[bool, ...]

    def encode(self) -> dict[str, Any]:
        """Return the branches as plain data; raise UndescribedError if they call more than functions of modules."""
        assert isinstance(self.conditions, GraphModule)
        graph = self.conditions.graph
        code = graph.python_code("self")
        others = {name: value for name, value in code.globals.items() if name not in _NAMES_OF_FX}
        if graph.find_nodes(op="get_attr") or not all(isinstance(value, types.ModuleType) for value in others.values()):
            raise UndescribedError("it depends on values of inputs through a constant or a function")
        modules = {name: value.__name__ for name, value in others.items()}
        return {"code": code.src, "modules": modules, "sources": self.sources, "answers": self.answers}

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> ValueBranches:
        """Inverse of `encode`."""
        names = {**_NAMES_OF_FX, **{name: importlib.import_module(each) for name, each in data["modules"].items()}}
        exec(data["code"], names)
        return cls(functools.partial(names["forward"], None), tuple(data["sources"]), tuple(data["answers"]))

    def answers_for(self, scope: Mapping[str, Any], names: Mapping[str, Any]) -> tuple[bool, ...]:
        """Return the answers for a call (module, args, kwargs), given globals.

        Answers after the first that differs may be of other questions.
        """
        values = [eval(code, {"L": scope, "G": names}) for code in self._codes]
        with torch.no_grad():
            holds = self.conditions(*values).tolist()
        return tuple(answer == held for answer, held in zip(self.answers, holds, strict=True))

    @functools.cached_property
    def _codes(self) -> list[types.CodeType]:
        return [compile(source, "guard", "eval") for source in self.sources]


def begin_answers() -> bool:
    """Begin a run of forward; part of the traced function."""
    _open.given.clear()
    return True


def decide(condition: torch.Tensor, likely: bool, what: str) -> bool:
    """Return whether a condition holds, for a branch of a function that Dynamo traces.

    `likely` is the answer if the trace does not know it; `what` says what decides and what to do, for a message.
    """
    answer = _next_answer(likely)
    if answer is None:
        return bool(condition)
    assert_async(condition if answer else ~condition, _BEGIN + what)
    return answer


def _next_answer(likely: bool) -> bool | None:
    """Return the answer to the next question. Dynamo runs this during the trace, whose result is a constant of it."""
    if _open.answers is None:
        return None
    index = len(_open.given)
    _open.given.append(_open.answers[index] if index < len(_open.answers) else likely)
    return _open.given[-1]


def branches_of(graph: GraphModule, sources: Sequence[str], values: Sequence[Any], answers: Sequence[bool]) -> Any:
    """Return the `ValueBranches` of a trace; None if it has none, False if they are not about inputs alone.

    `sources` and `values` are of the graph's inputs, in order, `answers` of the trace.
    """
    asserts = [node for node in graph.graph.nodes if node.target is assert_async]
    asked = [node for node in asserts if str(node.args[-1]).startswith(_BEGIN)]
    if not asked:
        return None
    inputs = dict(zip(graph.graph.find_nodes(op="placeholder"), zip(sources, values, strict=True), strict=True))
    sizes = {
        symbol: (node, dim)
        for node, (_, value) in inputs.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        for dim, size in enumerate(node.meta["example_value"].shape)
        if isinstance(symbol := expression(size), sympy.Symbol)
    }
    needed: dict[Node, None] = {}
    known: dict[Node, Any] = {}  # sizes of what is computed, of parameters even: numbers, or places in inputs
    left = [node.args[0] for node in asked]
    while left:
        node = left.pop()
        if node in needed or node in known:
            continue
        value = node.meta.get("example_value")
        size = expression(value) if isinstance(value, (int, torch.SymInt)) else None
        if node not in inputs and (isinstance(size, int) or size in sizes):
            known[node] = sizes.get(size, size)
            left += known[node][:1] if size in sizes else []
            continue
        if isinstance(inputs.get(node, ("", None))[1], nn.Parameter) or not _is_pure(node):
            return False
        needed[node] = None
        left += node.all_input_nodes
    made, copies, read = Graph(), dict[Node, Any](), list[str]()
    for node in graph.graph.nodes:
        place = known.get(node)
        if isinstance(place, tuple):
            copies[node] = made.call_method("size", (copies[place[0]], place[1]))
        elif node in known:
            copies[node] = place
        elif node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if node in inputs:
                read.append(inputs[node][0])
    parts = [made.call_method("reshape", (copies[node.args[0]], ())) for node in asked]
    made.output(made.call_function(torch.stack, (parts,)))
    return ValueBranches(GraphModule(graph, made), tuple(read), tuple(answers))


def _is_pure(node: Node) -> bool:
    """Return whether a node of the torch-level graph computes a value and changes nothing."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_call = node.op in ("call_function", "call_method") and (name.startswith("__") or not name.endswith("_"))
    return is_call or node.op in ("placeholder", "get_attr")


# --- questions of transformers ------------------------------------------------------------------------------------


@contextlib.contextmanager
def eager_answers(answers: Sequence[bool] | None = ()) -> Iterator[list[bool]]:
    """Answer as eager mode does while the block is open; yield the answers of the last run, complete when it ends.

    `answers` to questions about values are known, in their order; None leaves these to Dynamo.
    """
    for name, substitute in (
        ("transformers.utils.import_utils", _substitute_questions),
        ("transformers.masking_utils", _substitute_masks),
    ):
        if name in sys.modules:
            substitute(sys.modules[name])
    before = _open.answers, _open.given
    _open.answers, _open.given = answers, []
    _open.depth += 1
    for function in (begin_answers, _next_answer):
        torch.compiler.assume_constant_result(function)
    try:
        yield _open.given
    finally:
        _open.depth -= 1
        _open.answers, _open.given = before


@functools.cache
def _substitute_questions(questions: Any) -> None:
    torch.compiler.assume_constant_result(_is_asked_by_graphshard)
    if hasattr(questions, "is_tracing"):

        @torch.compiler.substitute_in_graph(questions.is_tracing)
        def is_tracing(tensor: Any = None) -> bool:
            return not _is_asked_by_graphshard()

    if hasattr(questions, "is_torchdynamo_exporting"):

        @torch.compiler.substitute_in_graph(questions.is_torchdynamo_exporting)
        def is_torchdynamo_exporting() -> bool:
            return not _is_asked_by_graphshard() and torch.compiler.is_exporting()


@functools.cache
def _substitute_masks(masks: Any) -> None:
    torch.compiler.assume_constant_result(_is_asked_by_graphshard)
    if hasattr(masks, "fast_all"):
        fast_all_traced = _copy(masks.fast_all)

        @torch.compiler.substitute_in_graph(masks.fast_all)
        def fast_all(tensor: torch.Tensor) -> Any:
            holds = fast_all_traced(tensor)
            return decide(holds, False, _PADDING) if _is_asked_by_graphshard() else holds

    if hasattr(masks, "_ignore_bidirectional_mask_sdpa"):
        ignore_traced = _copy(masks._ignore_bidirectional_mask_sdpa)

        @torch.compiler.substitute_in_graph(masks._ignore_bidirectional_mask_sdpa)
        def _ignore_bidirectional_mask_sdpa(
            padding_mask: torch.Tensor | None, kv_length: int, local_attention_size: int | None = None
        ) -> Any:
            if padding_mask is None or not _is_asked_by_graphshard():
                return ignore_traced(padding_mask, kv_length, local_attention_size)
            without = ignore_traced(None, kv_length, local_attention_size)
            return without and decide(padding_mask.all(), False, _PADDING)

    if hasattr(masks, "find_packed_sequence_indices"):
        find_traced = _copy(masks.find_packed_sequence_indices)

        @torch.compiler.substitute_in_graph(masks.find_packed_sequence_indices)
        def find_packed_sequence_indices(position_ids: torch.Tensor) -> Any:
            if not _is_asked_by_graphshard():
                return find_traced(position_ids)
            first = position_ids[:, :1] - 1
            packed = (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
            return None if decide((packed[:, -1] == 0).all(), True, _PACKED) else packed


def without_warnings(module: nn.Module) -> None:
    """Let models of transformers not look for padding that no mask is given for; in a block of `as_written`.

    They do to warn, and values of tensors decide. Guards leave the attribute out.
    """
    for each in module.modules():
        if hasattr(type(each), WARNING):
            each.__dict__[WARNING] = _no_warning


def _no_warning(input_ids: Any, attention_mask: Any) -> None:
    """Do not warn."""


def _copy(function: Any) -> Any:
    """Return a function that is the same and is not substituted."""
    code = function.__code__
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def _is_asked_by_graphshard() -> bool:
    return _open.depth > 0

"""Tiny models, programs at any stage of the pipeline, and steps on simulated ranks without process groups.

program = captured(Blocks(2), (torch.randn(2, 4),))     the joint graph
through(program, "partition")                           forward and backward
through(program, "reorder")                             scheduled
step(program, model, [(x0,), (x1,)])                    what both ranks compute
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Node

from graphshard.errors import GraphBreak
from graphshard.frontend.capture import capture
from graphshard.frontend.dynamo_capture import TracedFunction
from graphshard.frontend.graph_breaks import raise_break, traced_or_break
from graphshard.frontend.inputs import apart
from graphshard.frontend.signature import CaptureSpec
from graphshard.frontend.unit_boundaries import boundary_class
from graphshard.ir.graph import WAIT, fake, is_collective
from graphshard.ir.mesh import Mesh
from graphshard.ir.operators import (
    ALL_GATHER,
    ALL_TO_ALL,
    COALESCED_FORMS,
    MODEL_WAIT,
    NAMING_GROUPS,
    REDUCE_SCATTER,
    STARTS,
)
from graphshard.ir.param_table import ParamSpec, build_table
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.units import find_units, precision_of
from graphshard.passes import MakePlan
from graphshard.pipeline.pipeline import Pipeline, run_pass
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.torch_compat.torch_ops import pytree

COALESCED = PlanByUnit(pack_gathers_below=0, pack_reductions_below=0)
PACKED = PlanByUnit(pack_gathers_below=math.inf, pack_reductions_below=math.inf)


class Scale(nn.Module):
    """`x * w`: the smallest graph with a parameter."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, rows + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


class Scales(nn.Module):
    """`x * w0 * w1 * ...`: every factor is a unit."""

    def __init__(self, depth: int = 2, rows: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale(rows) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Affine(nn.Module):
    """`a * x + b`: two parameters in one unit, the root. They are registered in the order b, a."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.arange(1.0, rows + 1))
        self.a = nn.Parameter(torch.arange(2.0 * rows).view(rows, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x + self.b[:, None]


class Blocks(nn.Module):
    """Linear layers with ReLUs; every layer is a unit."""

    def __init__(self, depth: int = 2, width: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


class Tied(nn.Module):
    """A small language model with tied weights: `head.weight` is `embed.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).sin().sum()


class ParallelBiases(nn.Module):
    """`f(x) + g(x)`: both layers have equal gradients, so the partitioner's CSE sees equal reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.g = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.f(x) + self.g(x)).sum()


def captured(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int = 2,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    grad: bool = True,
    dynamic_shapes: Any = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Program:
    """Capture `model(*args, **kwargs)` as `graphshard.compile(model, mesh, ...)` does, with no tensor passed twice."""
    names = find_units(model, units)
    precision = precision_of(mp_policy, names)
    mesh = Mesh.of_shape(world_size)
    table = build_table(
        model,
        mesh=mesh,
        units=names,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
    )
    spec = CaptureSpec(table, names, mesh, device, precision, type(model), dynamic_shapes)
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    given, named = pytree.tree_unflatten(apart(leaves), structure)
    trace = functools.partial(capture, model, given, named, spec, TracedFunction("test"), boundary_class, grad=grad)
    try:
        return traced_or_break(f"{type(model).__name__}.forward", trace)
    except GraphBreak as error:
        raise_break(error)


def through(program: Program, last: str, *, planner: PlanByUnit = COALESCED) -> Program:
    """Run the passes that the program has not seen yet, up to and including `last`.

    Outputs that are not differentiated stay: `drop-unused-tangents` only runs when it is `last`.
    """
    seen = {stage.name for stage in program.history} | ({"plan"} if program.plan else set())
    for p in Pipeline().replace("plan", MakePlan(planner)):
        if p.name not in seen and (p.name != "drop-unused-tangents" or p.name == last):
            run_pass(p, program)
        if p.name == last:
            return program
    raise ValueError(f"the pipeline has no pass {last!r}")


def copied(program: Program) -> Program:
    """Copy a program so that its graphs can be rewritten; tests share the time of a capture."""
    phases = {name: phase.clone() for name, phase in program.phases.items()}
    return replace(program, phases=phases, history=list(program.history), established=set(program.established))


def target_name(node: Node) -> str:
    """Return the name of a node's operator, such as "mm"."""
    target = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def calls(phase: Phase, name: str) -> list[Node]:
    """Return all calls of an operator in a phase."""
    return [n for n in phase.module.graph.nodes if n.op == "call_function" and target_name(n) == name]


def result(phase: Phase, label: str) -> Any:
    """Return the value that a phase returns as `label`, such as "grad:layers.0.weight"."""
    return phase.results[list(map(str, phase.outputs)).index(label)]


def run_ranks(
    phase: Phase, inputs: Sequence[Mapping[Slot, Any]], sent: list[list[torch.Tensor]] | None = None
) -> list[dict[Slot, Any]]:
    """Run a phase on all ranks at once, node by node; collectives exchange values between the simulated ranks.

    `sent` collects one entry per reduced tensor: the tensors that the ranks send.
    """
    values: list[dict[Node, Any]] = [{} for _ in inputs]
    slots = phase.slot_of()
    for node in phase.module.graph.nodes:
        if node.op == "output":
            continue
        args = [pytree.tree_map(lambda a, v=v: v[a] if isinstance(a, Node) else a, node.args) for v in values]
        if node.op == "placeholder":
            results = [given[slots[node]] for given in inputs]
        elif is_collective(node):
            results = _collective(node, [a[0] for a in args], sent)
        elif node.target in (WAIT, MODEL_WAIT):
            results = [a[0] for a in args]
        elif node.target in NAMING_GROUPS:
            results = _of_the_model(node.target, node.args, [a[0] for a in args])
        elif node.op == "call_module":
            results = [getattr(phase.module, node.target)(list(*a)) for a in args]
        else:
            results = [node.target(*a, **node.kwargs) for a in args]
        for value, r in zip(values, results, strict=True):
            value[node] = r
    return [
        {s: v[r] if isinstance(r, Node) else r for s, r in zip(phase.outputs, phase.results, strict=True)}
        for v in values
    ]


def _collective(node: Node, tensors: list[Any], sent: list[list[torch.Tensor]] | None) -> list[Any]:
    """Compute a collective's results per rank from its inputs per rank."""
    if isinstance(tensors[0], (list, tuple)):
        single = [_collective(node, list(column), sent) for column in zip(*tensors)]
        return list(map(list, zip(*single)))
    if "gather" in target_name(node):
        return [torch.cat(tensors)] * len(tensors)
    if sent is not None:
        sent.append(tensors)
    return _scattered(node.args[1], tensors)


def _scattered(operation: Any, tensors: list[Any]) -> list[Any]:
    total = torch.stack(tensors).sum(0)
    if operation == "avg":
        total = total / len(tensors)
    return list(total.chunk(len(tensors)))


def _of_the_model(operator: Any, args: Any, tensors: list[Any]) -> list[Any]:
    """Compute the results per rank of the model's own collective: all-gather, reduce-scatter or even all-to-all."""
    if operator in COALESCED_FORMS.values():
        single = next(done for done, together in COALESCED_FORMS.items() if together is operator)
        columns = [_of_the_model(single, args, list(column)) for column in zip(*tensors)]
        return list(map(list, zip(*columns)))
    if operator in (ALL_GATHER, STARTS[ALL_GATHER]):
        return [torch.cat(tensors)] * len(tensors)
    if operator in (REDUCE_SCATTER, STARTS[REDUCE_SCATTER]):
        return _scattered(args[1], tensors)
    assert operator in (ALL_TO_ALL, STARTS[ALL_TO_ALL]), operator
    return [torch.cat(pieces) for pieces in zip(*(tensor.chunk(len(tensors)) for tensor in tensors))]


def padded_shard(param: torch.Tensor, row: ParamSpec, rank: int) -> torch.Tensor:
    """Return a rank's shard of a full parameter. The padding is NaN, which must not reach any result."""
    start, length = row.local_range(rank)
    shard = torch.empty_strided(row.padded_shape, row.stride_of(row.padded_shape), dtype=row.dtype)
    shard.fill_(math.nan if row.dtype.is_floating_point else -1)
    shard.narrow(row.dim, 0, length).copy_(param.detach().narrow(row.dim, start, length))
    return shard


def step(
    program: Program,
    model: nn.Module,
    batches: Sequence[Sequence[torch.Tensor]],
    tangents: Mapping[str, torch.Tensor] | None = None,
    sent: list[list[torch.Tensor]] | None = None,
) -> list[dict[str, Any]]:
    """Run one step of a partitioned program on simulated ranks, with one batch per rank.

    Returns, per rank, what both phases return by label: "output:0", "grad:w", "mutation:buffer", ... Tangents default
    to ones.
    """
    inputs = []
    for rank, batch in enumerate(batches):
        given = {Slot("input", str(i)): t for i, t in enumerate(batch)}
        given |= {Slot("size", size.name): batch[size.source[0]].shape[size.source[1]] for size in program.sizes}
        given |= {Slot("buffer", n): b.clone() for n, b in [*model.named_buffers(), *program.constants.items()]}
        for row in program.params:
            given[Slot("param", row.name)] = padded_shard(model.get_parameter(row.name), row, rank)
        inputs.append(given)
    results = run_ranks(program.phases["forward"], inputs)
    if backward := program.phases.get("backward"):
        for given, outputs in zip(inputs, results):
            given.update((slot, value) for slot, value in outputs.items() if slot.kind == "saved")
            for node, slot in backward.slot_of().items():
                if slot.kind == "late":
                    given[slot] = outputs.get(f"mutation:{slot.name}", given[Slot("buffer", slot.name)])
                if slot.kind == "tangent":
                    ones = torch.ones(fake(node).shape, dtype=fake(node).dtype)
                    given[slot] = tangents[slot.name] if tangents else ones
        gradients = run_ranks(backward, inputs, sent)
        results = [{**outputs, **grads} for outputs, grads in zip(results, gradients)]
    return [{str(slot): value for slot, value in by_slot.items()} for by_slot in results]


def full_gradients(program: Program, results: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | None]:
    """Concatenate the ranks' gradient shards by parameter name and cut the padding."""
    grads = {}
    for row in program.params:
        shards = [r.get(f"grad:{row.name}") for r in results]
        grads[row.name] = None if shards[0] is None else torch.cat(shards)[: row.shape[0]]
    return grads


def mean_gradients(model: nn.Module, batches: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor | None]:
    """Compute the gradients without graphshard: the mean over the batches, by parameter name."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = [model(*batch).sum() for batch in batches]
    grads = [torch.autograd.grad(loss, list(params.values()), allow_unused=True) for loss in losses]
    means = [None if column[0] is None else torch.stack(column).mean(0) for column in zip(*grads)]
    return dict.fromkeys(dict(model.named_parameters())) | dict(zip(params, means))


def assert_gradients(program: Program, model: nn.Module, batches: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that a program's gradients are the mean over the ranks, within rounding."""
    found = full_gradients(program, step(program, model, batches))
    torch.testing.assert_close(found, mean_gradients(model, batches))


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes: "VmRSS" now, "VmHWM" the peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024

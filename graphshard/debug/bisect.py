"""Bisection: find the pass, or the region, after which a program computes something else.

Every stage of a program can run: the captured graph on full parameters, later ones on shards with real collectives.
All run operator by operator on the same inputs, and each is compared with the one before. Then each compiled region is
compared with its own operators.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter

from graphshard.errors import ArgumentError
from graphshard.ir.graph import fake
from graphshard.ir.param_table import ParamSpec
from graphshard.ir.program import Phase, Program, Slot
from graphshard.ir.sizes import evaluate, expression, given_sizes
from graphshard.ir.transport import reduced_over
from graphshard.lower.backends import compiler_for
from graphshard.lower.eager import compile_eager
from graphshard.lower.executor import Executor
from graphshard.lower.regions import Boxed, RegionCall, lower, reshape_views
from graphshard.module.compiled_module import compiled_module
from graphshard.module.runner import Runner
from graphshard.module.tracer import ModuleCall
from graphshard.options.validate import check_examples
from graphshard.pipeline.instrumentation import Observer
from graphshard.runtime.process_groups import bind_groups, shard_index
from graphshard.runtime.shards import ParamRef, padded_shard
from graphshard.torch_compat.dtensor import process_group
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import check_number
from graphshard.utils.text import users_class

# Rounding of sums in another order, relative to the largest element, by the precision of the computation.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class StageDifference:
    """Distance of a stage, or of a region, from its reference.

    Attributes:
        error: largest difference of an element, relative to the largest element of its tensor; over all ranks.
        where: the output, gradient, buffer or region result with that error.
        exact: False if the pass says that it may change the numbers.
    """

    name: str
    error: float
    where: str
    exact: bool = True


@dataclass(frozen=True)
class Bisection:
    """Result of `bisect`; prints as a table.

    Attributes:
        stages: every stage, compared with the one before.
        regions: every call of a compiled region, compared with its operators; empty with `backend="eager"`.
        tolerance: the error up to which a difference is rounding.
    """

    stages: tuple[StageDifference, ...]
    regions: tuple[StageDifference, ...]
    tolerance: float

    @property
    def culprit(self) -> StageDifference | None:
        """The first stage or region that differs beyond the tolerance, without passes that may change the numbers."""
        claims = [found for found in (*self.stages, *self.regions) if found.exact]
        return next((found for found in claims if found.error > self.tolerance), None)

    def __str__(self) -> str:
        worst = sorted(self.regions, key=lambda found: -found.error)[:5]
        width = max(len(found.name) for found in (*self.stages, *worst))
        lines = []
        for found in (*self.stages, *worst):
            mark = "<-- first" if found is self.culprit else "" if found.exact else "may change numerics"
            where = found.where if found.error else "equal"
            lines.append(f"{found.name:{width}}  {found.error:8.1e}  {where}  {mark}".rstrip())
        if len(self.regions) > len(worst):
            lines.append(f"{len(self.regions)} region calls in all, the {len(worst)} with the largest error shown")
        if culprit := self.culprit:
            where = f"{culprit.where} by {culprit.error:.1e} of its largest element"
            lines.append(f"{culprit.name} is the first to differ: {where}")
        else:
            lines.append(f"no stage differs from the one before by more than {self.tolerance:.1e}")
        return "\n".join(lines)


def bisect(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Bisection:
    """Find the first pass, and the first compiled region, that changes the results of a compiled module.

    Call it on all ranks, with inputs of a call. Gradients are of the sum of the differentiated outputs. Full parameters
    are gathered once, for the captured graph: use a configuration that fits.
    The module's parameters, gradients and buffers do not change.

    Args:
        tolerance: relative error up to which a difference counts as rounding; None chooses by dtype.

    Raises:
        ArgumentError: the module was not compiled.
    """
    model = compiled_module(model)
    check_examples(model, args, {} if kwargs is None else kwargs, ("args", "kwargs"))
    if tolerance is not None:
        check_number("tolerance", tolerance)
    runner = model._graphshard
    if runner.sealed:
        raise ArgumentError(
            f"{users_class(model).__name__} was loaded from a file, which has no stages to compare. Compile it in "
            "process, with graphshard.compile and the options of the export."
        )
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    leaves = runner.tracer.on_device(leaves, structure)
    snapshots = _Snapshots("off")
    call_args, call_kwargs = pytree.tree_unflatten(leaves, structure)
    call = ModuleCall(model, call_args, call_kwargs, torch.is_grad_enabled())
    program, _ = runner.tracer.trace(call, snapshots, "bisect", passes=runner.passes)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    stage_runner = _StageRunner(runner, model, tensors, program)
    stages, before = [], None
    for snapshot in snapshots.taken:
        now = stage_runner.run(snapshot)
        if before is not None:
            stages.append(StageDifference(snapshot.name, *_compare(before, now, runner), snapshot.exact))
        before = now
    compiled = runner.tracer.options.backend == "inductor"
    regions = _compare_regions(runner, program, stage_runner) if compiled else ()
    if tolerance is None:
        dtypes = {row.compute_dtype for row in program.params} | {row.reduce_dtype for row in program.params}
        tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
    return Bisection(tuple(stages), tuple(regions), tolerance)


@dataclass(frozen=True)
class _Snapshot:
    """Graphs of a stage; `sharded` once parameters enter as shards and gradients leave reduced."""

    name: str
    exact: bool
    phases: dict[str, Phase]
    sharded: bool
    lowered: bool = False


@dataclass
class _Snapshots(Observer):
    """Observer that keeps the graphs of every stage."""

    taken: list[_Snapshot] = field(default_factory=list)

    def after(self, program: Program, name: str, rewrites: int, seconds: float, *, exact: bool = True) -> None:
        self.taken.append(_Snapshot(name, exact, _clone(program), "sharded_inputs" in program.established))


def _clone(program: Program) -> dict[str, Phase]:
    return {name: phase.clone() for name, phase in program.phases.items()}


@dataclass
class _StageRunner:
    """Runs any stage on the same real inputs."""

    runner: Runner
    model: nn.Module
    tensors: list[torch.Tensor]
    program: Program

    def run(self, stage: _Snapshot) -> dict[str, torch.Tensor]:
        """Return all outputs, updated buffers and gradients of a stage; gradients as this rank's shards."""
        found: dict[str, torch.Tensor] = {}
        saved: dict[Slot, Any] = {}
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for phase in stage.phases.values():
                inputs = [
                    saved[slot] if slot in saved else self._read(slot, fake(node), sharded=stage.sharded)
                    for slot, node in zip(phase.inputs, phase.placeholders, strict=True)
                ]
                graph = copy.deepcopy(phase.module.graph)
                bind_groups(graph, self.runner.groups)
                if stage.lowered:
                    values = Executor(phase.module, graph).forward(inputs)
                else:
                    reshape_views(graph)
                    module = GraphModule(phase.module, graph)
                    values = Interpreter(module).run(*inputs, enable_io_processing=False)
                for slot, value in zip(phase.outputs, values, strict=True):
                    if slot.kind not in ("output", "mutation", "grad"):
                        saved[slot] = value
                    elif isinstance(value, torch.Tensor):
                        is_gradient = slot.of == "param" and slot.kind == "grad"
                        found[str(slot)] = self._shard(slot, value, stage) if is_gradient else value
        return found

    def _read(self, slot: Slot, traced: torch.Tensor, *, sharded: bool) -> Any:
        if slot.kind == "param":
            ref = next(ref for ref in self.runner.tracer.params if ref.row.name == slot.name)
            row = self.program.params[slot.name]
            return (padded_shard(ref.param, row) if sharded else self._full(ref, row)).to(traced.dtype)
        if slot.kind == "input":
            return self.tensors[int(slot.name)]
        sizes = given_sizes(self.program.sizes, self.tensors)
        if slot.kind == "size":
            return sizes[slot.name]
        if slot.kind == "tangent":
            backward = self.program.phases.get("backward")
            used = {s.name for s in backward.inputs if s.kind == "tangent"} if backward else set()
            fill = float(slot.name in used)
            env = {size.symbol: sizes[size.name] for size in self.program.sizes}
            shape = [evaluate(expression(size), env) for size in traced.shape]
            return torch.full(shape, fill, dtype=traced.dtype, device=self.runner.tracer.spec.device)
        constant = self.program.constants.get(slot.name)
        return (constant if constant is not None else self.model.get_buffer(slot.name)).clone()

    def _shard(self, slot: Slot, value: torch.Tensor, stage: _Snapshot) -> torch.Tensor:
        """Return a gradient as this rank's shard in the stored dtype, reduced here if the stage did not."""
        row = self.program.params[slot.name]
        experts = self.runner.tracer.spec.experts
        rank = shard_index(experts.data if row.expert and experts is not None else self.runner.mesh)
        if row.ignored:
            return value
        if stage.sharded:
            return row.without_padding(value, rank).to(row.dtype)
        mean = value.to(row.reduce_dtype).contiguous()
        axes = reduced_over(row, self.program)
        for left in row.split.sums if row.split is not None else ():  # parts on ranks of tensor axes
            operation = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[left.operation]
            dist.all_reduce(mean, operation, group=self._group(left.axis))
            if left.num_pieces > 1:
                mean = mean.chunk(left.num_pieces)[self._group(left.axis).rank()].contiguous()
        for axis in axes:
            dist.all_reduce(mean, group=self._group(axis.name))
        factor = row.divide_factor or math.prod(axis.size for axis in axes)
        return row.piece(mean / factor, rank).to(row.dtype)

    def _full(self, ref: ParamRef, row: ParamSpec) -> torch.Tensor:
        """Return a full parameter, or this rank's part on axes along which the model communicates."""
        if row.num_shards == 1:
            param = ref.param.detach()
            return param.to_local() if isinstance(param, DTensor) else param
        shard = padded_shard(ref.param, row).detach().contiguous()
        shards = [torch.empty_like(shard) for _ in range(row.num_shards)]
        dist.all_gather(shards, shard, group=self._group(row.on(self.program.mesh).shard.name))
        return torch.cat(shards, row.dim).narrow(row.dim, 0, row.shape[row.dim])

    def _group(self, axis: str) -> dist.ProcessGroup:
        return process_group(self.runner.groups[axis])


def _compare(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], runner: Runner) -> tuple[float, str]:
    """Return the largest relative error over all tensors and ranks, and where it is."""
    names = sorted({*before, *now})
    errors = [_error(before.get(name), now.get(name)) for name in names]
    everywhere = torch.tensor(errors, dtype=torch.float64, device=runner.tracer.spec.device)
    for name in runner.groups.values():
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=process_group(name))
    worst = int(everywhere.argmax()) if names else 0
    return (float(everywhere[worst]), names[worst]) if names else (0.0, "")


def _error(before: torch.Tensor | None, now: torch.Tensor | None) -> float:
    """Return the largest difference relative to the largest element; a missing gradient is zero."""
    if before is None or now is None:
        value = before if before is not None else now
        assert value is not None
        return 1.0 if value.any() else 0.0
    if before.shape != now.shape or before.dtype != now.dtype:
        return float("inf")
    if not before.numel() or torch.equal(before, now):
        return 0.0
    left, right = before.double(), now.double()
    error = float((left - right).abs().max() / left.abs().max().clamp_min(1e-30))
    return float("inf") if math.isnan(error) else error


def _compare_regions(runner: Runner, program: Program, stage_runner: _StageRunner) -> list[StageDifference]:
    """Lower the program, and compare each call of a compiled region with its operators, on the operators' inputs."""
    lowered = copy.copy(program)
    lowered.phases = _clone(program)
    lower(lowered, compiler_for(runner.tracer.options.backend), runner.tracer.compiled)
    found: list[StageDifference] = []
    names = {key: name for name, key in lowered.region_names.items()}

    def check(key: str) -> Boxed:
        eager, compiled = compile_eager(lowered.regions[key]), runner.tracer.compiled[key]

        def call(inputs: list[Any]) -> Any:
            values = list(inputs)
            inputs.clear()
            state = torch.get_rng_state()
            expected = eager(list(values))
            torch.set_rng_state(state)
            got = compiled(list(values))
            labels = [f"result {i}" for i in range(len(expected))]
            error, where = _compare(dict(zip(labels, expected)), dict(zip(labels, got)), runner)
            found.append(StageDifference(f"{names[key]} (call {len(found)})", error, where))
            return expected

        return call

    checked = {key: RegionCall(check(key)) for key in lowered.regions}
    lowered.phases = _clone(program)
    lower(lowered, compiler_for("eager"), checked)
    stage_runner.run(_Snapshot("lower", True, lowered.phases, sharded=True, lowered=True))
    return found

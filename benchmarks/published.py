"""Predictions of published training steps: each is rebuilt on meta with its mesh, batch, checkpointing and machine.

    python -m benchmarks.published [--rows mpt torchtitan] [--no-fit]

Prints predicted and published seconds, grouped by source: `published_steps.py` has the sources. "p10 to p90" follows
from the ranges of the profiles' constants. "left out" is the error if the constants of `FREE`, the only fitted ones,
are fitted on the rows of all other sources: no row has its own constant.

The differences of FSDP1 and FSDP2 from graphshard are modeled here: they copy each unit's parameters out of the
gathered buffer, and gradients into the reduction buffer, in the reduce dtype; plain autograd saves the values that
backward needs and recomputes only checkpointed ones; units are gathered in their order, one ahead. XLA's and compiled
rows run fused kernels.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.published_steps import MPTS, ROWS, Checkpointing, Row, model_of
from graphshard.cost.costs import Costs
from graphshard.cost.flops import Gemm
from graphshard.cost.kernels import Work, work_of
from graphshard.cost.profile import Profile, load_profile, number_at, sampled, with_numbers
from graphshard.ir.graph import is_backward, is_part, is_view, with_parts
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Program
from graphshard.ir.recompute import SAVE
from graphshard.options.options import Options
from graphshard.options.resolve import pipeline_of
from graphshard.passes import ActivationCheckpointing, Pass
from graphshard.predict.step_prediction import PERCENTILES
from graphshard.predict.study import Study
from graphshard.schedule.clock import Launch, TimedCall, TimedEvent, TimedWait, run
from graphshard.schedule.timeline import estimate

aten = torch.ops.aten


@dataclass(frozen=True)
class SaveAsEager(ActivationCheckpointing):
    """Pass that marks what eager mode saves: everything that no region recomputes, and regions' inputs and selected
    values.
    """

    name = "save-as-eager"
    choice: Checkpointing = "none"

    def rewrite(self, program: Program) -> int:
        changed = super().rewrite(program) if self.choice != "none" else 0
        products: dict[int, int] = {}
        (joint,) = program.phases.values()
        for node in joint.module.graph.nodes:
            if node.op != "call_function" or is_backward(node) or is_view(node) or is_part(node):
                continue
            region = node.meta.get("ac_graph_id")
            saved = region is None  # outside of blocks, or no block is checkpointed
            if self.choice == "op" and region is not None and node.target is aten.mm.default:
                products[region] = products.get(region, 0) + 1
                saved = products[region] % 2 == 1
            elif self.choice == "op" and "scaled_dot_product" in str(node.target):
                saved = True
            elif self.choice == "not mlp" and node.target is aten.mm.default:
                saved = not any("feed_forward" in str(name) for name, *_ in node.meta["nn_module_stack"].values())
            for value in with_parts(node) if saved else ():
                value.meta["recompute"] = SAVE
        return changed + 1


class PublishedStudy(Study):
    """Study of a step that graphshard does not run."""

    row: Row

    def _passes(self, program: Program, costs: Costs) -> tuple[Pass, ...]:
        """Plan unit by unit, as FSDP does, with the row's saved values."""
        passes = pipeline_of(self.options, program.mesh, None).passes
        if self.row.backend == "eager" or self.row.checkpointing != "none":
            return SaveAsEager(policy="full", choice=self.row.checkpointing), *passes
        return passes


@dataclass(frozen=True)
class Case:
    """Row, and the components of its step.

    Attributes:
        kernels: by region.
        events: of the clock; calls and collectives are priced again for each machine.
        tensors: number of tensors that a launch carries, by its index.
        trained: bytes of the shards of trained parameters.
        flop: of the model in a microbatch.
        unread: kernels that backward repeats without a reader.
    """

    row: Row
    kernels: Mapping[str, Sequence[Work]]
    events: Sequence[TimedEvent]
    tensors: Mapping[int, int]
    trained: int
    flop: float
    unread: Sequence[Work] = ()

    def seconds(self, profile: Profile) -> float:
        """Return the seconds of an optimizer step on a machine."""
        row, mesh = self.row, Mesh.of_shape((self.row.ranks,))
        rates = {
            name: replace(rate, attention={"flash": rate.attention.get(row.attention, rate.attention["flash"])})
            for name, rate in profile.rates.items()
        }
        profile = replace(profile, ranks_per_node=row.ranks_per_node, rates=rates)
        costs = Costs(profile, mesh=mesh, fused=row.backend != "eager")
        regions = {name: costs.kernels(works) for name, works in self.kernels.items()}
        events: list[TimedEvent] = []
        place: dict[int, int] = {}
        for index, event in enumerate(self.events):
            place[index] = len(events)
            if isinstance(event, TimedCall):
                events.append(replace(event, seconds=regions[event.name]))
            elif isinstance(event, Launch):
                seconds = costs.collective(event.kind, event.num_bytes, self.tensors[index], mesh.shard)
                if event.kind == "reduce" and row.backend != "xla":  # from bfloat16 into a float32 buffer
                    seconds = seconds + costs.copy(0.75 * event.num_bytes)
                events.append(replace(event, seconds=seconds))
            elif isinstance(event, TimedWait):
                events.append(replace(event, launch=place[event.launch]))
                launch = self.events[event.launch]
                if isinstance(launch, Launch) and launch.kind == "gather" and row.backend != "xla":
                    copied = costs.copy(launch.num_bytes)
                    events.append(TimedCall("copy out", event.phase, event.order, None, "", copied, alone=True))
        step = run(events, profile.contention).step(events) + costs.kernels(self.unread)
        return (
            row.microbatches * step
            + costs.optimizer(self.trained, 2, foreach=row.backend == "eager")
            + costs.clipping(self.trained)
        )


def case_of(row: Row) -> Case:
    """Capture a row's model and schedule it as in its measurement."""
    tokens = torch.zeros(row.batch, row.seq, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    study = PublishedStudy(model_of(row), (tokens, tokens), None, Options(mp_policy=policy))
    study.row = row
    mesh = Mesh.of_shape((row.ranks,))
    costs = Costs(load_profile("h100"), mesh=mesh, fused=row.backend != "eager")
    program = study._lowered(mesh, study._prepared(mesh, costs), costs)
    events = estimate(program, costs).events
    return Case(
        row,
        {
            name: work_of(list(program.regions[key].module.graph.nodes), fused=costs.fused)
            for name, key in program.region_names.items()
        },
        [replace(event, node=None) for event in events],
        {i: len(e.node.all_input_nodes) for i, e in enumerate(events) if isinstance(e, Launch) and e.node is not None},
        program.params.trained_bytes,
        float(sum(study._target(mesh, study.model).flop.values())),
        unread_of(row),
    )


def unread_of(row: Row) -> Sequence[Work]:
    """Return what checkpointing of whole blocks recomputes without a reader in backward: the product at their end."""
    if row.checkpointing != "whole":
        return ()
    layers, dim, _ = MPTS[row.model]
    last = Gemm(1, row.batch * row.seq, dim, 4 * dim)
    moved = 2 * (last.rows * last.inner + last.inner * last.columns + last.rows * last.columns)
    return [Work("matmul", last.flop, 0, moved, "bfloat16", (last,))] * layers


@dataclass(frozen=True)
class Free:
    """Fitted constant: one factor on numbers of profiles.

    The profiles hold the fit on all rows, so a fit on some of them must not start there.

    Attributes:
        prior: factor from the profiles' numbers to the values known without published steps.
        sigma: relative deviation that the factor may have from the prior.
    """

    name: str
    machines: tuple[str, ...]
    paths: tuple[str, ...]
    prior: float
    sigma: float


_FLASH_1 = tuple(f"rates.bfloat16.attention.flash1.{direction}" for direction in ("forward", "backward"))
_ALL = ("a100", "h100", "h100-hbm2e", "h200")
FREE = (
    # 0.95 of the largest measured product, MAMF: 271 of 312 and 794 of 989 TFLOP/s.
    Free("limit of products on an A100 in training", ("a100",), ("sustained",), 0.95 * 271 / 312 / 0.82, 0.08),
    Free("limit of products on an H100 or H200 in training", ("h100", "h200"), ("sustained",), 0.95 * 0.803 / 0.7, 0.1),
    # Proportional to the square root of the power, from 700 to 500 W.
    Free("limit of products on an H100 at 500 W", ("h100-hbm2e",), ("sustained",), 0.95 * 0.803 * 0.845 / 0.56, 0.15),
    # 30 to 50 % forward and 25 to 35 % backward on an A100, as FlashAttention-2's paper says.
    Free("FlashAttention 1 on an A100", ("a100",), _FLASH_1, 0.4 / 0.35, 0.2),
    # 1.5 times as fast as on an A100.
    Free("FlashAttention 1 on an H100", ("h100",), _FLASH_1, 1.1, 0.4),
    Free("memory bandwidth", _ALL, ("memory_bandwidth",), 0.9 / 0.93, 0.06),
    Free("straggler", _ALL, ("straggler",), 0.005 / 0.008, 0.7),
)
# Remaining relative error between a model and measurements.
NOISE = 0.05
_STEP = 0.02
_ROUNDS = 4

Factors = Mapping[str, float]


def machine(name: str, factors: Mapping[str, Any] = MappingProxyType({})) -> Profile:
    """Return a profile with the fitted constants multiplied by factors; arrays of factors give arrays of seconds."""
    profile = load_profile(name)
    numbers: dict[str, Any] = {}
    for free in FREE:
        if name in free.machines and free.name in factors:
            numbers |= {path: number_at(profile, path) * factors[free.name] for path in free.paths}
    return with_numbers(profile, numbers)


def fit(cases: Sequence[Case]) -> Factors:
    """Return the factors that fit cases best, each drawn to its prior by its sigma (Gauss-Newton on logarithms)."""
    known = np.log([free.prior for free in FREE])
    logs = known
    for _ in range(_ROUNDS):
        # All slopes at once: the first column has the current factors, and each other one changes one of them.
        tried = logs[:, None] + np.concatenate([np.zeros((len(FREE), 1)), _STEP * np.eye(len(FREE))], axis=1)
        factors = {free.name: np.exp(row) for free, row in zip(FREE, tried)}
        seconds = np.array([np.broadcast_to(c.seconds(machine(c.row.machine, factors)), tried.shape[1]) for c in cases])
        errors = np.log(seconds) - np.log([[c.row.seconds] for c in cases])
        slopes = (errors[:, 1:] - errors[:, :1]) / _STEP
        prior = np.diag([1 / free.sigma for free in FREE])
        rows = np.concatenate([slopes / NOISE, prior])
        wanted = np.concatenate([-errors[:, 0] / NOISE, (known - logs) / [free.sigma for free in FREE]])
        logs = logs + np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return {free.name: float(np.exp(log)) for free, log in zip(FREE, logs)}


def left_out(cases: Sequence[Case]) -> dict[Row, float]:
    """Return seconds of each row with constants fitted on the other sources only."""
    found = {}
    for source in dict.fromkeys(case.row.source for case in cases):
        factors = fit([case for case in cases if case.row.source != source])
        found |= {c.row: float(c.seconds(machine(c.row.machine, factors))) for c in cases if c.row.source == source}
    return found


def orders(seconds: Mapping[Row, float]) -> Iterator[tuple[Row, Row, bool]]:
    """Yield pairs of variants of one setup measured at least 2 % apart, faster first, and whether predictions agree."""
    for one, other in itertools.permutations(seconds, 2):
        if one.setup == other.setup and one.seconds * 1.02 < other.seconds:
            yield one, other, seconds[one] < seconds[other]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows with one of these words")
    parser.add_argument("--no-fit", action="store_true", help="skip the fit on other sources")
    args = parser.parse_args()
    rows = [row for row in ROWS if not args.rows or any(word in f"{row.source} {row}" for word in args.rows)]
    cases = []
    for row in rows:
        print(f"{row.source}: {row}", file=sys.stderr, flush=True)
        cases.append(case_of(row))
    report(cases, with_fit=not args.no_fit)


def report(cases: Sequence[Case], *, with_fit: bool) -> None:
    """Print predictions with the current profiles, and with constants fitted on other sources."""
    seconds = {case.row: float(case.seconds(machine(case.row.machine))) for case in cases}
    others = left_out(cases) if with_fit else {}
    print(f"{'seconds of a step':72}{'published':>10}{'predicted':>10}{'error':>8}{'p10 to p90':>18}{'left out':>10}")
    source = ""
    for case in cases:
        row = case.row
        if row.source != source:
            print(source := row.source)
        low, high = np.percentile(case.seconds(sampled(load_profile(row.machine))), PERCENTILES)
        fitted = f"{others[row] / row.seconds - 1:+10.1%}" if row in others else ""
        print(
            f"  {row!s:70}{row.seconds:10.3f}{seconds[row]:10.3f}{seconds[row] / row.seconds - 1:+8.1%}"
            f"{f'{low:.3f} to {high:.3f}':>18}{fitted}"
        )
    for what, found, most in (("with the profiles' constants", seconds, 0.1), ("source left out", others, 0.15)):
        if found:
            errors = [value / row.seconds - 1 for row, value in found.items()]
            near = sum(abs(error) <= most for error in errors)
            print(
                f"{what}: mean {statistics.mean(errors):+.1%}, mean of absolute values "
                f"{statistics.mean(map(abs, errors)):.1%}, {near} of {len(errors)} within {most:.0%}"
            )
    pairs = list(orders(seconds))
    print(f"order of variants that were measured 2 % apart: {sum(right for *_, right in pairs)} of {len(pairs)} right")
    for one, other, right in pairs:
        if not right:
            print(f"  wrong: {one} before {other}")
    if with_fit:
        print("factors on the profiles' constants, fitted on all sources:")
        for name, factor in fit(cases).items():
            print(f"  {factor:6.3f}  {name}")


if __name__ == "__main__":
    main()

"""Published training steps, predicted: each is rebuilt on meta with its mesh, batch, checkpointing and machine.

    python -m benchmarks.published [--rows mpt torchtitan] [--no-fit]

Prints predicted against published seconds, grouped by source: `ROWS` says where each is from. "p10 to p90" is what
follows from the ranges of the profiles' constants. "left out" is the error if the constants of `FREE`, which are all
that is fitted, are fitted on the rows of all other sources: no row has a constant of its own.

What FSDP1 and FSDP2 do and graphshard does not is modelled here: they copy each unit's parameters out of the gathered
buffer, and gradients into the buffer that is reduced, in the reduce dtype; plain autograd saves what backward needs and
computes nothing again that is not checkpointed; units are gathered in their order, one ahead. XLA's and compiled rows
run kernels that are fused.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.cost.costs import Costs
from graphshard.cost.kernels import Work, work_of
from graphshard.cost.multiplications import Gemm
from graphshard.cost.profile import Profile, load_profile
from graphshard.cost.samples import number_at, sampled, with_numbers
from graphshard.explain.spread import PERCENTILES
from graphshard.explain.study import Study
from graphshard.ir.graph import is_backward, is_part, is_view, with_parts
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Program
from graphshard.ir.recomputed import SAVE
from graphshard.options.options import Options
from graphshard.options.passes import pipeline_of
from graphshard.passes import ActivationCheckpointing, Pass
from graphshard.schedule.clock import Call, Event, Launch, Wait, run
from graphshard.schedule.timeline import estimate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import llama

aten = torch.ops.aten

Checkpointing = Literal["none", "op", "not mlp", "full", "whole"]
Backend = Literal["eager", "compiled", "xla"]


@dataclass(frozen=True)
class Row:
    """One published step.

    Attributes:
        source: what rows are grouped by.
        model: of `MODELS`.
        ranks: GPUs, all of them shards.
        batch, seq: of one rank's microbatch.
        microbatches: that an optimizer step accumulates.
        checkpointing: "op" saves every second product and attention, as torchtitan does; "not mlp" all products but
            those of the feed-forward layers, as MaxText's `save_dot_except_mlp`; "full" only blocks' inputs; "whole"
            computes the last product of a block again, too, which nobody reads, as torch before 2.1.
        backend: what ran the operators.
        machine: a profile, and the name of its network.
        seconds: of an optimizer step.
        ranks_per_node: where it is not the profile's.
        attention: the kernel, of those that profiles have speeds of.
    """

    source: str
    model: str
    ranks: int
    batch: int
    seq: int
    microbatches: int
    checkpointing: Checkpointing
    backend: Backend
    machine: str
    seconds: float
    ranks_per_node: int = 8
    attention: str = "flash"

    @property
    def setup(self) -> tuple[object, ...]:
        """What variants of one setup share: model, tokens and machine; ranks, checkpointing and backend differ."""
        return self.source, self.model, self.batch, self.seq, self.microbatches, self.machine

    def __str__(self) -> str:
        """Short, for the table."""
        times = f" x {self.microbatches}" if self.microbatches > 1 else ""
        what = f"{self.model}, {self.ranks} x {self.machine}, {self.batch} x {self.seq}{times}"
        return f"{what}, {self.checkpointing}, {self.backend}"


def _per_second(tokens_per_second: float, batch: int, seq: int, microbatches: int = 1) -> float:
    """Seconds of a step, from the tokens that one GPU trains in a second."""
    return batch * seq * microbatches / tokens_per_second


# torchtitan docs/performance.md of 2024, at 0413364: tokens/s of a GPU, on 64 A100 80 GB.
_TITAN_A100 = "torchtitan A100"
# torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100 with HBM2e of 2.4 TB/s, at 500 W, 400 Gb/s for each GPU.
_TITAN_H100 = "torchtitan H100"
# NGC's recipe 25.01.1 for MaxText, table of its page.
_MAXTEXT = "MaxText"
# KempnerForge benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md: nodes of 4 H200.
_KEMPNER = "KempnerForge"
# llm-foundry scripts/train/benchmarking/README.md at 061f2c7: FSDP1, amp_bf16; tokens over tokens/s. What ran it
# is inferred: attention was Triton's or FlashAttention 1 (`attn_impl` of submit_benchmarks.py and sweep.py there)
# but for 7B on 128, and torch was older than 2.1, which ends recomputation where nobody reads it, but for 128.
_MPT_A100, _MPT_H100 = "llm-foundry A100", "llm-foundry H100"

ROWS = (
    Row(_TITAN_A100, "llama3-8b", 64, 1, 8192, 1, "op", "eager", "a100", _per_second(2973, 1, 8192)),
    Row(_TITAN_A100, "llama3-70b", 64, 1, 8192, 1, "full", "eager", "a100", _per_second(331, 1, 8192)),
    Row(_TITAN_A100, "llama2-13b", 64, 2, 4096, 1, "none", "eager", "a100", _per_second(2162, 2, 4096)),
    Row(_TITAN_A100, "llama2-13b", 64, 2, 4096, 1, "op", "eager", "a100", _per_second(1904, 2, 4096)),
    Row(_TITAN_A100, "llama2-70b", 64, 1, 4096, 1, "op", "eager", "a100", _per_second(355, 1, 4096)),
    Row(_TITAN_A100, "llama2-70b", 64, 2, 4096, 1, "full", "eager", "a100", _per_second(353, 2, 4096)),
    Row(_TITAN_H100, "llama3-8b", 8, 2, 8192, 1, "op", "eager", "h100-hbm2e", _per_second(5762, 2, 8192)),
    Row(_TITAN_H100, "llama3-8b", 8, 2, 8192, 1, "op", "compiled", "h100-hbm2e", _per_second(6667, 2, 8192)),
    Row(_TITAN_H100, "llama3-8b", 128, 2, 8192, 1, "op", "eager", "h100-hbm2e", _per_second(5605, 2, 8192)),
    Row(_TITAN_H100, "llama3-8b", 128, 2, 8192, 1, "op", "compiled", "h100-hbm2e", _per_second(6514, 2, 8192)),
    Row(_MAXTEXT, "llama2-70b", 256, 2, 4096, 1, "not mlp", "xla", "h100", 7.153, attention="cudnn"),
    Row(_MAXTEXT, "llama3-70b", 128, 2, 8192, 1, "full", "xla", "h100", 15.570, attention="cudnn"),
    Row(_KEMPNER, "llama3-8b", 1, 4, 4096, 2, "full", "compiled", "h200", 3.129, 4),
    Row(_KEMPNER, "llama3-8b", 2, 4, 4096, 2, "full", "compiled", "h200", _per_second(18728 / 2, 4, 4096, 2), 4),
    Row(_KEMPNER, "llama3-8b", 4, 4, 4096, 2, "full", "compiled", "h200", 3.362, 4),
    Row(_KEMPNER, "llama3-14.8b", 8, 4, 4096, 4, "full", "eager", "h200", _per_second(35405 / 8, 4, 4096, 4), 4),
    Row(_MPT_A100, "mpt-1b", 8, 14, 2048, 4, "none", "eager", "a100", 917504 / 164109, attention="flash1"),
    Row(_MPT_A100, "mpt-3b", 8, 10, 2048, 2, "none", "eager", "a100", 327680 / 86491, attention="flash1"),
    Row(_MPT_A100, "mpt-7b", 8, 6, 2048, 2, "none", "eager", "a100", 5.295, attention="flash1"),
    Row(_MPT_A100, "mpt-7b", 8, 16, 4096, 2, "whole", "eager", "a100", 1048576 / 29472, attention="flash1"),
    Row(_MPT_A100, "mpt-13b", 8, 2, 2048, 3, "none", "eager", "a100", 5.432, attention="flash1"),
    Row(_MPT_A100, "mpt-30b", 8, 3, 2048, 21, "whole", "eager", "a100", 1032192 / 7330, attention="flash1"),
    Row(_MPT_H100, "mpt-1b", 8, 14, 2048, 1, "none", "eager", "h100", 0.631, attention="flash1"),
    Row(_MPT_H100, "mpt-1b", 16, 20, 2048, 1, "none", "eager", "h100", 655360 / 736596, attention="flash1"),
    Row(_MPT_H100, "mpt-1b", 64, 20, 2048, 1, "none", "eager", "h100", 2621440 / 2841754, attention="flash1"),
    Row(_MPT_H100, "mpt-3b", 16, 10, 2048, 3, "none", "eager", "h100", 983040 / 386285, attention="flash1"),
    Row(_MPT_H100, "mpt-3b", 64, 6, 2048, 3, "none", "eager", "h100", 2359296 / 1441663, attention="flash1"),
    Row(_MPT_H100, "mpt-7b", 8, 6, 2048, 1, "none", "eager", "h100", 1.155, attention="flash1"),
    Row(_MPT_H100, "mpt-7b", 128, 6, 2048, 1, "none", "eager", "h100", 1.173),
    Row(_MPT_H100, "mpt-7b", 8, 8, 8192, 2, "whole", "eager", "h100", 18.900, attention="flash1"),
    Row(_MPT_H100, "mpt-13b", 8, 2, 2048, 1, "none", "eager", "h100", 32768 / 38336, attention="flash1"),
    Row(_MPT_H100, "mpt-13b", 64, 2, 2048, 1, "none", "eager", "h100", 262144 / 307209, attention="flash1"),
    Row(_MPT_H100, "mpt-30b", 32, 14, 2048, 3, "whole", "eager", "h100", 2752512 / 73860, attention="flash1"),
    Row(_MPT_H100, "mpt-30b", 128, 8, 2048, 1, "full", "eager", "h100", 7.451, attention="flash1"),
    Row(_MPT_H100, "mpt-70b", 64, 8, 2048, 4, "whole", "eager", "h100", 4194304 / 66523, attention="flash1"),
)


class ComplexAttention(llama.Attention):
    """Rotates pairs as complex numbers, as torchtitan does: fewer kernels in eager mode than with real numbers."""

    def rotate(self, x: Tensor) -> Tensor:
        """Of shape (batch, heads, seq, head_dim)."""
        turns = torch.complex(self.cos, self.sin)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class MptBlock(nn.Module):
    """A block of MPT: layer norms, one product for query, key and value, a GELU of four widths; biases everywhere."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT with learned positions; the table of tokens is the head, too."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int, vocab: int = 50368) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.layers = nn.ModuleList(MptBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


_LLAMA3 = {"kv_heads": 8, "vocab": 128256}
LLAMAS = {
    "llama3-8b": {"layers": 32, "dim": 4096, "heads": 32, "hidden": 14336, **_LLAMA3},
    "llama3-14.8b": {"layers": 40, "dim": 5120, "heads": 40, "hidden": 17920, **_LLAMA3},
    "llama3-70b": {"layers": 80, "dim": 8192, "heads": 64, "hidden": 28672, **_LLAMA3},
    "llama2-13b": {"layers": 40, "dim": 5120, "heads": 40, "hidden": 13824, "vocab": 32000},
    "llama2-70b": {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 32000},
}
# Layers, width and heads.
MPTS = {
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}


def model_of(row: Row) -> nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        if row.model in MPTS:
            return Mpt(*MPTS[row.model], row.seq)
        model = llama.Llama(llama.LlamaConfig(seq=row.seq, **LLAMAS[row.model]))
    if row.source in (_TITAN_A100, _TITAN_H100):
        for module in model.modules():
            if isinstance(module, llama.Attention):
                module.__class__ = ComplexAttention
    return model


@dataclass(frozen=True)
class SaveAsEager(ActivationCheckpointing):
    """Marks what eager mode saves: all that no region computes again; of regions their inputs, and what they choose."""

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
            saved = region is None  # it is in no block, or no block is checkpointed
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
    """A study of a step that is not graphshard's own."""

    row: Row

    def _passes(self, program: Program, costs: Costs) -> tuple[Pass, ...]:
        """Unit by unit, as FSDP does; what is saved as the row says."""
        passes = pipeline_of(self.options, program.mesh, None).passes
        if self.row.backend == "eager" or self.row.checkpointing != "none":
            return SaveAsEager(policy="full", choice=self.row.checkpointing), *passes
        return passes


@dataclass(frozen=True)
class Case:
    """A row, and what its step consists of.

    Attributes:
        kernels: by region.
        events: of the clock; calls and collectives are priced again for each machine.
        tensors: by the index of a launch, how many it carries.
        trained: bytes of the shards of trained parameters.
        flop: of the model in a microbatch.
        unread: kernels that backward runs once more for nobody.
    """

    row: Row
    kernels: Mapping[str, Sequence[Work]]
    events: Sequence[Event]
    tensors: Mapping[int, int]
    trained: int
    flop: float
    unread: Sequence[Work] = ()

    def seconds(self, profile: Profile) -> float:
        """Of an optimizer step on a machine."""
        row, mesh = self.row, Mesh.of_shape((self.row.ranks,))
        rates = {
            name: replace(rate, attention={"flash": rate.attention.get(row.attention, rate.attention["flash"])})
            for name, rate in profile.rates.items()
        }
        profile = replace(profile, ranks_per_node=row.ranks_per_node, rates=rates)
        costs = Costs(profile, mesh=mesh, fused=row.backend != "eager")
        regions = {name: costs.kernels(works) for name, works in self.kernels.items()}
        events: list[Event] = []
        place: dict[int, int] = {}
        for index, event in enumerate(self.events):
            place[index] = len(events)
            if isinstance(event, Call):
                events.append(replace(event, seconds=regions[event.name]))
            elif isinstance(event, Launch):
                seconds = costs.collective(event.kind, event.num_bytes, self.tensors[index], mesh.shard)
                if event.kind == "reduce" and row.backend != "xla":  # from bfloat16 into a buffer in float32
                    seconds = seconds + costs.copy(0.75 * event.num_bytes)
                events.append(replace(event, seconds=seconds))
            elif isinstance(event, Wait):
                events.append(replace(event, launch=place[event.launch]))
                launch = self.events[event.launch]
                if isinstance(launch, Launch) and launch.kind == "gather" and row.backend != "xla":
                    copied = costs.copy(launch.num_bytes)
                    events.append(Call("copy out", event.phase, event.order, None, "", copied, alone=True))
        step = run(events, profile.contention).step(events) + costs.kernels(self.unread)
        return (
            row.microbatches * step
            + costs.optimizer(self.trained, 2, foreach=row.backend == "eager")
            + costs.clipping(self.trained)
        )


def case_of(row: Row) -> Case:
    """Capture a row's model and schedule it as it was measured."""
    tokens = torch.zeros(row.batch, row.seq, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    study = PublishedStudy(model_of(row), (tokens, tokens), None, Options(mp_policy=policy))
    study.row = row
    mesh = Mesh.of_shape((row.ranks,))
    profile = load_profile("h100")
    before_plan = study._prepared(mesh, profile)
    program = study._program(mesh, before_plan, costs := Costs(profile, mesh=mesh, fused=row.backend != "eager"))
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
        float(sum(study._subject(mesh, study.model).flop.values())),
        unread_of(row),
    )


def unread_of(row: Row) -> Sequence[Work]:
    """What checkpointing of whole blocks computes again beyond what backward reads: the product at their end."""
    if row.checkpointing != "whole":
        return ()
    layers, dim, _ = MPTS[row.model]
    last = Gemm(1, row.batch * row.seq, dim, 4 * dim)
    moved = 2 * (last.rows * last.inner + last.inner * last.columns + last.rows * last.columns)
    return [Work("matmul", last.flop, 0, moved, "bfloat16", (last,))] * layers


@dataclass(frozen=True)
class Free:
    """A constant that is fitted: one factor on numbers of profiles.

    The profiles hold what was fitted on all rows, so a fit on some of them must not begin there.

    Attributes:
        prior: the factor that makes of the profiles' numbers what is known without published steps.
        sigma: by how much the factor may differ from that, as a fraction.
    """

    name: str
    machines: tuple[str, ...]
    paths: tuple[str, ...]
    prior: float
    sigma: float


_FLASH_1 = tuple(f"rates.bfloat16.attention.flash1.{direction}" for direction in ("forward", "backward"))
_ALL = ("a100", "h100", "h100-hbm2e", "h200")
FREE = (
    # 0.95 of the largest product that was measured, MAMF: 271 of 312 and 794 of 989 TFLOP/s.
    Free("limit of products on an A100 in training", ("a100",), ("sustained",), 0.95 * 271 / 312 / 0.82, 0.08),
    Free("limit of products on an H100 or H200 in training", ("h100", "h200"), ("sustained",), 0.95 * 0.803 / 0.7, 0.1),
    # As the square root of the power, from 700 to 500 W.
    Free("limit of products on an H100 at 500 W", ("h100-hbm2e",), ("sustained",), 0.95 * 0.803 * 0.845 / 0.56, 0.15),
    # 30 to 50 % forward and 25 to 35 % backward on an A100, as FlashAttention-2's paper says.
    Free("FlashAttention 1 on an A100", ("a100",), _FLASH_1, 0.4 / 0.35, 0.2),
    # 1.5 times as fast as on an A100.
    Free("FlashAttention 1 on an H100", ("h100",), _FLASH_1, 1.1, 0.4),
    Free("memory bandwidth", _ALL, ("memory_bandwidth",), 0.9 / 0.93, 0.06),
    Free("straggler", _ALL, ("straggler",), 0.005 / 0.008, 0.7),
)
# What is left between a model and measurements, as a fraction.
NOISE = 0.05
_STEP = 0.02
_ROUNDS = 4

Factors = Mapping[str, float]


def machine(name: str, factors: Mapping[str, Any] = MappingProxyType({})) -> Profile:
    """A profile with the fitted constants multiplied by factors, by their names; arrays make arrays of seconds."""
    profile = load_profile(name)
    numbers: dict[str, Any] = {}
    for free in FREE:
        if name in free.machines and free.name in factors:
            numbers |= {path: number_at(profile, path) * factors[free.name] for path in free.paths}
    return with_numbers(profile, numbers)


def fit(cases: Sequence[Case]) -> Factors:
    """Factors that fit cases best, each drawn towards its prior by its sigma (Gauss-Newton on logarithms)."""
    known = np.log([free.prior for free in FREE])
    logs = known
    for _ in range(_ROUNDS):
        # All slopes at once: the first column has the factors as they are, each other one has one of them changed.
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
    """Seconds of each row with constants that are fitted on the other sources alone."""
    found = {}
    for source in dict.fromkeys(case.row.source for case in cases):
        factors = fit([case for case in cases if case.row.source != source])
        found |= {c.row: float(c.seconds(machine(c.row.machine, factors))) for c in cases if c.row.source == source}
    return found


def orders(seconds: Mapping[Row, float]) -> Iterator[tuple[Row, Row, bool]]:
    """Pairs of variants of one setup that were measured at least 2 % apart, the faster one first, and if that is so."""
    for one, other in itertools.permutations(seconds, 2):
        if one.setup == other.setup and one.seconds * 1.02 < other.seconds:
            yield one, other, seconds[one] < seconds[other]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows that have one of these words")
    parser.add_argument("--no-fit", action="store_true", help="without the constants that others are fitted with")
    args = parser.parse_args()
    rows = [row for row in ROWS if not args.rows or any(word in f"{row.source} {row}" for word in args.rows)]
    cases = []
    for row in rows:
        print(f"{row.source}: {row}", file=sys.stderr, flush=True)
        cases.append(case_of(row))
    report(cases, with_fit=not args.no_fit)


def report(cases: Sequence[Case], *, with_fit: bool) -> None:
    """Print what is predicted with the profiles as they are, and with what is fitted on other sources."""
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

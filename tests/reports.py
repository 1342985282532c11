"""Reports to render: a small one that uses every feature, and a deep one."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphshard.debug.html_report import (
    BucketView,
    Measured,
    RegionView,
    Report,
    Span,
    Spread,
    Timeline,
)
from graphshard.ir.plan import Bucket
from graphshard.ir.program import Stage
from graphshard.schedule.memory_timeline import Alive, MemoryPoint, MemoryTimeline

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'{{ 7 * 7 }}<!--"

BEFORE = """\
forward:
  %0: f32[8, 64] = param:layers.0.weight
  %1: f32[4, 64] = input:0
* %2: f32[64, 64] = all_gather_into_tensor(%0, 8, shard)  # layers.0
  %3: f32[64, 64] = wait_tensor(%2)  # layers.0
  %4: f32[64, 64] = t(%3)  # layers.0
  %5: f32[4, 64] = mm(%1, %4)  # layers.0
  %6: f32[4, 64] = relu(%5)
  %7: f32[4, 64] = detach(%6)
  %8: f32[4, 64] = neg(%7)
  %9: f32[4, 64] = cos(%8)
  %10: f32[4, 64] = sin(%9)
  %11: f32[4, 64] = exp(%10)
  %12: f32[4, 64] = abs(%11)
  %13: f32[4, 64] = log(%12)
  return %13 as output:0
"""
# The cast %20 is added, %2 sends its result, %7 is gone, %13 moves up, %8 reads another value.
AFTER = """\
forward:
  %0: f32[8, 64] = param:layers.0.weight
  %1: f32[4, 64] = input:0
  %20: bf16[8, 64] = _to_copy(%0, dtype=bf16)  # layers.0
* %2: bf16[64, 64] = all_gather_into_tensor(%20, 8, shard)  # layers.0
  %3: f32[64, 64] = wait_tensor(%2)  # layers.0
  %4: f32[64, 64] = t(%3)  # layers.0
  %13: f32[4, 64] = log(%12)
  %5: f32[4, 64] = mm(%1, %4)  # layers.0
  %6: f32[4, 64] = relu(%5)
  %8: f32[4, 64] = neg(%6)
  %9: f32[4, 64] = cos(%8)
  %10: f32[4, 64] = sin(%9)
  %11: f32[4, 64] = exp(%10)
  %12: f32[4, 64] = abs(%11)
  return %13 as output:0
"""


@dataclasses.dataclass(frozen=True)
class StageView(Stage):
    """A stage whose folded text is given."""

    folded: str = ""  # type: ignore[assignment]


def small_report(**changes: Any) -> Report:
    """Build a report of two layers: three gathers and two reductions, of which one each is exposed."""
    unfolded = "".join(f"  %{i}: f32[4] = relu(%{i - 1})\n" for i in range(30, 60))
    stages = (
        StageView("capture", 0, 1.5, BEFORE, 16, True, BEFORE),
        StageView("mixed-precision", 2, 0.002, AFTER, 16, False, AFTER),
        StageView("bucket", 5, 0.03, AFTER + unfolded, 46, True, AFTER + "  ... 30 times\n"),
        StageView("reorder", 0, 0.0004, AFTER + unfolded, 46, True, AFTER + "  ... 30 times\n"),
    )
    ms = 1e-3
    gather0 = Span("communication", "gather", "gather layers.0 in forward", 0, 2 * ms, "1.00 MiB over 8 ranks", 0, True)
    spans = (
        gather0,
        Span("compute", "exposed", gather0.name, 0, 2 * ms, "nothing to compute yet"),
        Span("compute", "compute", "region_0 layers.0", 2 * ms, 5 * ms, "16 ops in layers.0", 0, True),
        Span("communication", "gather", "gather layers.1 in forward", 2 * ms, 4 * ms, "", 1 * ms),
        Span("compute", "compute", "region_0", 5 * ms, 8 * ms, "16 ops in layers.1", 0, True),
        Span("communication", "gather", "gather layers.1 in backward", 8 * ms, 8.5 * ms, "", 3.5 * ms),
        Span("compute", "compute", "region_1", 8 * ms, 12 * ms, "", 0, True),
        Span("communication between nodes", "reduce", "reduce layers.1 in backward", 10 * ms, 11 * ms, "", 1 * ms),
        Span("communication between nodes", "reduce", "reduce layers.0 in backward", 12 * ms, 12.5 * ms, "", 0, True),
        Span("compute", "exposed", "reduce layers.0 in backward", 12 * ms, 12.5 * ms),
    )
    timeline = Timeline(
        spans,
        (("forward", 0, 8 * ms), ("backward", 8 * ms, 12.5 * ms)),
        12.5 * ms,
        10 * ms,
        6 * ms,
        2.5 * ms,
        2.5 * ms,
        "H100, 400 GB/s per axis, 60 % of peak FLOP/s.",
    )
    buckets = tuple(
        BucketView(
            Bucket(
                span.name,
                span.kind,  # type: ignore[arg-type]
                span.name.rsplit(" ", 1)[-1],
                (f"{span.name.split()[1]}.weight",),
                (f"{span.name.split()[1]}.bias",) if span.kind == "reduce" else (),
                "shard" if span.kind == "gather" else "replicate",
                int((span.end - span.start) * 2**29),
            ),
            "bf16",
            "after 12 of 340 ops, in layers.0",
            "after 30 of 340 ops, in layers.1",
            "" if span.start == 0 else "region_0",
            span.end - span.start,
            2 * ms if span.start == 0 else 0.0,
            span.slack or 0.0,
        )
        for span in spans
        if span.lane != "compute"
    )
    memory = MemoryTimeline(
        tuple(MemoryPoint(i * ms, int((1 + (i if i < 8 else 16 - i)) * 2**30)) for i in range(13)),
        9 * 2**30,
        8 * ms,
        (
            Alive("layers.1.saved", "saved for backward", 5 * 2**30),
            Alive("layers.1.weight", "gathered parameters", 3 * 2**30),
            Alive("layers.0.saved", "saved for backward", 2**30),
        ),
    )
    regions = (
        RegionView("region_0", "3f2a" * 16, 2, 16, "layers.0 to layers.1", 3 * ms, ()),
        RegionView("region_1", "91bc" * 16, 1, 40, "layers.1", 4 * ms),
    )
    facts = (("torch", "2.13.0"), ("mesh", "replicate 2, shard 8"), ("captured because", "first call"))
    report = Report("Blocks(2) on 16 ranks", facts, stages, buckets, timeline, memory, regions, files=True)
    return dataclasses.replace(report, **changes)


def measured_report() -> Report:
    """Build the small report with measured times: a third slower than predicted, and with an unpredicted wait."""
    plain = small_report()
    assert plain.timeline
    ms = 1e-3

    def spread(median: float) -> Spread:
        return Spread(0.9 * median * ms, median * ms, 1.2 * median * ms)

    said = "all ranks, in a step: 4.00 ms, 3.60 ms to 4.80 ms"
    spans = (
        Span("communication", "gather", "gather layers.0 in forward", 0.5 * ms, 3.5 * ms, said),
        Span("compute", "exposed", "gather layers.0 in forward", 0.6 * ms, 3.5 * ms, said),
        Span("communication", "gather", "gather layers.1 in forward", 3.2 * ms, 8 * ms, said),
        Span("compute", "compute", "region_0 layers.0", 3.5 * ms, 7.5 * ms, said),
        Span("compute", "exposed", "gather layers.1 in forward", 7.5 * ms, 8 * ms, said),
        Span("compute", "compute", "region_0 layers.1", 8 * ms, 12 * ms, said),
        Span("compute", "compute", "region_1 layers.1", 12.5 * ms, 16 * ms, said),
    )
    measured = Measured(1, 4, spans, spread(16.5), spread(11.5), spread(3.4), Spread(8 * 2**30, 9 * 2**30, 10 * 2**30))
    return small_report(
        timeline=dataclasses.replace(plain.timeline, measured=measured),
        buckets=tuple(dataclasses.replace(b, in_flight=spread(3), waited=spread(2)) for b in plain.buckets),
        regions=tuple(dataclasses.replace(r, measured=spread(8)) for r in plain.regions),
    )


def deep_report(num_layers: int = 126, ops: int = 160) -> Report:
    """Build a report the size of the largest models: 20,000 lines, a thousand spans."""

    def stage(i: int) -> str:
        lines = ["forward:"]
        for layer in range(num_layers):
            for op in range(ops):
                n = layer * ops + op
                if i > 2 and op == 5:
                    lines.append(
                        f"* %{n}: bf16[8192, 1024] = all_gather_into_tensor(%{n - 1}, 8, shard)  # layers.{layer}"
                    )
                elif not (i == 4 and op == 50):
                    other = i if op == 7 else 0
                    lines.append(f"  %{n}: bf16[8192, 1024] = mul(%{n - 1}, {other})  # layers.{layer}.feed_forward.w1")
            if i > 5:
                lines.insert(len(lines) - 20, lines.pop())
        return "\n".join(lines) + "\n"

    names = [
        "capture",
        "decompose",
        "insert-collectives",
        "mixed-precision",
        "reshard",
        "partition",
        "bucket",
        "reorder",
    ]
    stages = tuple(
        StageView(name, 1000 * i, 0.4 * i + 0.1, text, 20_000 + i, i != 3, "\n".join(text.splitlines()[:400]) + "\n")
        for i, (name, text) in enumerate((name, stage(i)) for i, name in enumerate(names))
    )
    spans: list[Span] = []
    buckets: list[BucketView] = []
    points: list[MemoryPoint] = []
    now = 0.0
    units = [(i, "forward") for i in range(num_layers)] + [(i, "backward") for i in reversed(range(num_layers))]
    for step, (i, phase) in enumerate(units):
        seconds = 0.004 if phase == "forward" else 0.008
        for k in range(3):
            part = seconds / 3
            spans.append(Span("compute", "compute", f"region_{k}", now + k * part, now + (k + 1) * part, f"layers.{i}"))
        for kind in ("gather", "reduce") if phase == "backward" else ("gather",):
            name = f"{kind} layers.{i} in {phase}"
            exposed = 0.0006 if i % 9 == 0 and kind == "gather" else 0.0
            end = now + seconds + exposed if exposed else now + seconds * (0.6 if kind == "gather" else 0.9)
            spans.append(
                Span(
                    "communication",
                    kind,
                    name,
                    now + (0.3 * seconds if kind == "reduce" else 0),
                    end,
                    "1.70 GiB, 64 ranks",
                )
            )
            if exposed:
                spans.append(Span("compute", "exposed", name, now + seconds, now + seconds + exposed, "too late"))
            params = tuple(f"layers.{i}.{m}.weight" for m in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"))
            packed = tuple(f"layers.{i}.{m}.weight" for m in ("attention_norm", "ffn_norm"))
            hidden = ", ".join(f"region_{k} of layers.{i}" for k in range(3))
            bucket = Bucket(name, kind, phase, params, packed, "shard", 1_700_000_000 + i)  # type: ignore[arg-type]
            place = f"after {step * 40} of 20160 ops, in layers.{i}"
            waited = f"after {step * 40 + 40} of 20160 ops, in layers.{i}"
            seconds_of = seconds * 0.6, exposed, 0.0
            buckets.append(BucketView(bucket, "bf16", place, waited, "" if exposed else hidden, *seconds_of))
            now += exposed
        now += seconds
        kept = step if phase == "forward" else 2 * num_layers - step
        points += [
            MemoryPoint(now - seconds * 0.9, (20 + kept // 3) * 2**30),
            MemoryPoint(now, (19 + kept // 3) * 2**30),
        ]
    compute = num_layers * 0.012
    phases = (("forward", 0.0, now / 3), ("backward", now / 3, now))
    timeline = Timeline(
        tuple(spans), phases, now, compute, 0.8 * compute, now - compute, 0.0, "H100, 400 GB/s per axis."
    )
    peak = max(points, key=lambda point: point.num_bytes)
    alive = tuple(
        Alive(
            f"layers.{i % num_layers}.value_{i}",
            ["saved for backward", "gathered parameters", "shards"][i % 3],
            2**28 - i,
        )
        for i in range(1500)
    )
    regions = tuple(
        RegionView(f"region_{k}", f"{k:064x}", 252, 40 + k, f"layers.0 to layers.{num_layers - 1}", 0.0013)
        for k in range(12)
    )
    memory = MemoryTimeline(tuple(points), peak.num_bytes, peak.time, alive)
    return Report(
        "Llama 3.1 405B on 8,192 ranks", small_report().facts, stages, tuple(buckets), timeline, memory, regions
    )

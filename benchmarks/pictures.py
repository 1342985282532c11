"""Pictures of the README: FSDP2's order above graphshard's plan, predicted for one step.

    python -m benchmarks.pictures

Writes `docs/images/order_and_plan.svg` and prints the predicted steps. Both schedules run the same program with the
same costs; only the order and the buckets of collectives differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from examples import llama
from graphshard.passes import MakePlan
from graphshard.predict.explanation import Explanation
from graphshard.schedule.fsdp2_order import PlanByUnit

LLAMA_8B = llama.LlamaConfig(vocab=128256, layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, seq=2048)
RANKS = 64
MEMORY_LIMIT = 70 * 10**9  # bytes, of an H100's 80 GB

WIDTH, LEFT, RIGHT = 960, 90, 16  # pixels; the lanes' names are at the left
LANE, GAP = 26, 34  # height of a lane, and space above a schedule for its title
STYLE = """
.page { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.axis { stroke: #8c959f }
.compute { fill: #6e7781 } .gather { fill: #0969da } .reduce { fill: #bf6a02 } .exposed { fill: #ff818266 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 } text { fill: #e6edf3 }
  .compute { fill: #9198a1 } .gather { fill: #4493f8 } .reduce { fill: #db8b28 } .exposed { fill: #f8514966 }
}
"""


@dataclass(frozen=True)
class Bar:
    """One operation on a lane, in seconds from the start of the step."""

    lane: str
    kind: str  # "compute", "gather", "reduce" or "exposed"
    start: float
    end: float


@dataclass(frozen=True)
class Lanes:
    """One schedule of a step."""

    title: str
    bars: Sequence[Bar]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(bar.lane for bar in self.bars))


def bars_of(trace: dict[str, Any]) -> list[Bar]:
    """Return the operations of a trace that `Explanation.save_trace` wrote."""
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes = {track: "network" if "between nodes" in lane else lane for track, lane in lanes.items()}
    return [
        Bar(lanes[event["tid"]], event["cat"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]


def drawn(schedules: Sequence[Lanes], description: str) -> str:
    """Return an SVG image of the schedules above each other on one axis of milliseconds."""
    last = max(bar.end for lanes in schedules for bar in lanes.bars)
    scale = (WIDTH - LEFT - RIGHT) / last
    height = sum(GAP + LANE * len(lanes.names) for lanes in schedules) + 50
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(description)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *_shapes(schedules, scale),
            *_axis(last, scale, height - 42),
            "</svg>\n",
        ]
    )


def _shapes(schedules: Sequence[Lanes], scale: float) -> Iterator[str]:
    top = 0
    for lanes in schedules:
        top += GAP
        yield f'<text class="title" x="0" y="{top - 10}">{escape(lanes.title)}</text>'
        for name in lanes.names:
            yield f'<text x="0" y="{top + 17}">{escape(name)}</text>'
            for bar in lanes.bars:
                if bar.lane == name:
                    x, width = LEFT + bar.start * scale, max((bar.end - bar.start) * scale - 0.4, 0.3)
                    place = f'x="{x:.1f}" y="{top + 3}" width="{width:.1f}" height="{LANE - 6}"'
                    yield f'<rect class="{bar.kind}" {place}/>'
            top += LANE


def _axis(last: float, scale: float, top: float) -> Iterator[str]:
    yield f'<path class="axis" d="M{LEFT} {top}H{WIDTH - RIGHT}"/>'
    for ms in range(0, int(last * 1e3) - 12, 50):
        yield f'<text x="{LEFT + ms / 1e3 * scale:.1f}" y="{top + 16}">{ms}{" ms" if ms == 0 else ""}</text>'
    x = LEFT
    for kind, text in (
        ("compute", "compute"),
        ("gather", "all-gather"),
        ("reduce", "reduce-scatter"),
        ("exposed", "compute waits"),
    ):
        yield f'<rect class="{kind}" x="{x}" y="{top + 26}" width="12" height="12"/>'
        yield f'<text x="{x + 17}" y="{top + 37}">{text}</text>'
        x += 130


def explained(**options: Any) -> Explanation:
    """Predict a step of Llama 3 8B, 2,048 tokens a rank, on 64 H100s."""
    with torch.device("meta"):
        model = llama.Llama(LLAMA_8B)
        tokens = torch.empty(1, LLAMA_8B.seq, dtype=torch.long)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return graphshard.explain(
        model, (RANKS,), example_inputs=(tokens, tokens), hardware="h100", mp_policy=precision, **options
    )


def lanes_of(name: str, step: Explanation) -> Lanes:
    """Return a predicted step as lanes, with its numbers in the title."""
    with tempfile.TemporaryDirectory() as folder:
        step.save_trace(Path(folder, "trace.json"))
        bars = bars_of(json.loads(Path(folder, "trace.json").read_text()))
    waits = sum(bar.end - bar.start for bar in bars if bar.kind == "exposed")
    title = f"{name}: {step.step_time_s * 1e3:.0f} ms, of which compute waits {waits * 1e3:.0f} ms"
    return Lanes(f"{title}; {step.peak_memory_bytes / 2**30:.1f} GiB", bars)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/order_and_plan.svg"))
    path = parser.parse_args().out
    by_unit = graphshard.Pipeline().replace("plan", MakePlan(PlanByUnit()))
    schedules = [
        lanes_of("FSDP2's order", explained(passes=by_unit)),
        lanes_of("graphshard's plan", explained(memory_limit=MEMORY_LIMIT)),
    ]
    description = f"A training step of Llama 3 8B on {RANKS} H100s, predicted. " + ". ".join(s.title for s in schedules)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn(schedules, description + "."))
    print(description)


if __name__ == "__main__":
    main()

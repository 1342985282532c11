"""Diagrams of the manual: the pipeline, the life of a block's parameters, and a mesh of replicas and shards.

    python -m benchmarks.diagrams

Writes `pipeline.svg`, `unit.svg` and `hsdp.svg` to `docs/images/`. They follow the reader's light or dark mode and are
legible on a phone. Only `unit.svg` moves, and not for readers who ask for less motion.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
.page { fill: #ffffff } text { font: 15px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.small { font-size: 13px; fill: #57606a } .left { text-anchor: start } .strong { font-weight: 600 }
.box { fill: #f6f8fa; stroke: #8c959f } .arrow { stroke: #57606a; fill: none; stroke-width: 1.5 }
.head { fill: #57606a }
.compute { fill: #6e7781 } .gather { fill: #0969da } .reduce { fill: #bf6a02 } .shard { fill: #8250df }
.on text, text.on { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 }
  .box { fill: #161b22; stroke: #6e7681 } .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
  .compute { fill: #656c76 } .gather { fill: #1f6feb } .reduce { fill: #9e5a00 } .shard { fill: #8957e5 }
}
"""
# Name and one line of each stage, in the order of compilation.
STAGES = (
    ("capture", "one joint graph"),
    ("shard", "gather, reduce"),
    ("precision", "casts of policies"),
    ("reshard", "gather again?"),
    ("partition", "forward, backward"),
    ("plan", "buckets and times"),
    ("bucket", "one per bucket"),
    ("reorder", "start, wait"),
    ("lower", "compiled regions"),
    ("run", "one step"),
)


def svg(width: int, height: int, title: str, shapes: Iterator[str], style: str = "") -> str:
    """Return a whole image."""
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join(
        [opened, f"<title>{escape(title)}</title>", f"<style>{STYLE}{style}</style>", page, *shapes, "</svg>\n"]
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str = "box", more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"{more}/>'


def _arrow(points: Sequence[tuple[float, float]]) -> str:
    (x, y), (fx, fy) = points[-1], points[-2]
    dx, dy = (x > fx) - (x < fx), (y > fy) - (y < fy)
    line = "M" + "L".join(f"{px:g} {py:g}" for px, py in points)
    tip = f"M{x:g} {y:g}l{-8 * dx - 5 * dy:g} {-8 * dy - 5 * dx:g}l{10 * dy:g} {10 * dx:g}z"
    return f'<path class="arrow" d="{line}"/><path class="head" d="{tip}"/>'


def pipeline() -> str:
    """Return the stages of compilation, five in a row."""

    def shapes() -> Iterator[str]:
        yield _text(70, 22, "model + mesh", "strong")
        yield _arrow([(70, 28), (70, 44)])
        for index, (name, line) in enumerate(STAGES):
            row, column = divmod(index, 5)
            x, y = 5 + 143 * column, 46 + 96 * row
            yield _box(x, y, 131, 56)
            yield _text(x + 65.5, y + 24, name, "strong")
            yield _text(x + 65.5, y + 44, line, "small")
            if column < 4:
                yield _arrow([(x + 131, y + 28), (x + 142, y + 28)])
            elif row == 0:
                yield _arrow([(x + 65, y + 56), (x + 65, y + 76), (70, y + 76), (70, y + 95)])

    return svg(722, 206, "Stages of compilation: " + ", ".join(name for name, _ in STAGES), shapes())


# One block: kind, lane, start, end and text, on an axis of 12 units of time.
LIFE = (
    ("gather", 0, 0.3, 2.3, "all-gather"),
    ("compute", 1, 2.5, 5, "forward"),
    ("gather", 0, 5.3, 7, "all-gather"),
    ("compute", 1, 7.2, 9.6, "backward"),
    ("reduce", 0, 9.75, 12, "reduce-scatter"),
)
# What a rank holds of the block: kind, start, end, height and text.
HELD = (
    ("shard", 0, 12, 16, "shard of parameters"),
    ("gather", 0.3, 5.1, 46, "full parameters"),
    ("gather", 5.3, 9.7, 46, "full parameters"),
    ("reduce", 7.2, 12, 34, "gradient"),
)


def unit() -> str:
    """Return one block's gathers, compute and frees on an axis of time, with a moving cursor."""
    left, scale = 92, 51.5

    def shapes() -> Iterator[str]:
        for lane, name in enumerate(("network", "compute")):
            yield _text(2, 30 + 42 * lane, name, "left")
        for kind, lane, start, end, text in LIFE:
            x, width = left + start * scale, (end - start) * scale
            yield _box(x, 8 + 42 * lane, width, 34, kind)
            yield _text(x + width / 2, 30 + 42 * lane, text, "on")
        yield _text(2, 190, "memory", "left")
        tops = (224, 176, 176, 140)
        for (kind, start, end, height, text), top in zip(HELD, tops):
            x, width = left + start * scale, (end - start) * scale
            yield _box(x, top, width, height, kind)
            yield _text(x + width / 2, top + height / 2 + 5, text, "on" if height > 16 else "on small")
        for x, text in ((5.1, "free"), (9.7, "free"), (12, "free")):
            yield _text(left + x * scale - 14, 122, text, "small")
        yield f'<rect class="cursor head" x="{left}" y="4" width="2" height="240"/>'
        yield _text(
            left + 6 * scale, 264, "time: the next block's all-gather overlaps with this block's compute", "small"
        )

    style = (
        f".cursor {{ animation: move 8s linear infinite }} @keyframes move {{ to {{ transform: translateX("
        f"{12 * scale:g}px) }} }}\n@media (prefers-reduced-motion: reduce) {{ .cursor {{ animation: none }} }}\n"
    )
    return svg(
        722, 274, "One block: gather, compute and free its parameters, in forward and in backward", shapes(), style
    )


def hsdp() -> str:
    """Return a mesh of two replicas with four shards each."""

    def shapes() -> Iterator[str]:
        for node in range(2):
            y = 16 + 128 * node
            yield _box(112, y, 600, 84)
            yield _text(2, y + 38, f"node {node}", "left strong")
            yield _text(2, y + 58, f"replica {node}", "left small")
            for gpu in range(4):
                x = 126 + 146 * gpu
                yield _box(x, y + 14, 132, 56, "shard")
                yield _text(x + 66, y + 38, f"rank {4 * node + gpu}", "on strong")
                yield _text(x + 66, y + 58, f"shard {gpu} of 4", "on")
                if node == 0:
                    yield _arrow([(x + 66, y + 106), (x + 66, y + 126)])
                    yield _arrow([(x + 66, y + 106), (x + 66, y + 86)])
        yield _text(2, 127, "all-reduce", "left small")
        yield _text(412, 250, "within a node: all-gather of parameters, reduce-scatter of gradients", "small")

    return svg(
        722, 262, "HSDP: shards within a node, replicas over nodes, gradients all-reduced between replicas", shapes()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().out
    for name, image in (("pipeline", pipeline()), ("unit", unit()), ("hsdp", hsdp())):
        (folder / f"{name}.svg").write_text(image)


if __name__ == "__main__":
    main()

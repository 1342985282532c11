"""Float32 matrix products by MKL and by oneDNN, interleaved; the basis of `lower/inductor.py`.

    python -m benchmarks.products                             all of these sizes with each other, on one thread
    python -m benchmarks.products --sizes 64 256 --threads 2

"forward" is x @ w.T, and "gradient" its input gradient, g @ w. The last columns are oneDNN's time relative to MKL's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from array import array
from statistics import median

import torch
from torch import Tensor

from graphshard.utils.environment_fingerprint import vendor

_SECONDS = 0.05  # for each of the two


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128, 512, 1536])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{vendor()}, torch {torch.__version__}, {args.threads} threads, MKL's milliseconds")
    print(f"{'rows':>6} {'inner':>6} {'columns':>8} {'forward':>9} {'gradient':>9} {'forward':>8} {'gradient':>9}")
    for rows, inner, columns in itertools.product(args.sizes, repeat=3):
        x, w, g = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
        forward, gradient = in_turns(x, w), in_turns(g, w.t())
        times = f"{1e3 * forward[0]:9.3f} {1e3 * gradient[0]:9.3f}"
        ratios = f"{forward[1] / forward[0]:8.2f} {gradient[1] / gradient[0]:9.2f}"
        print(f"{rows:6} {inner:6} {columns:8} {times} {ratios}", flush=True)


def by_onednn(x: Tensor, w: Tensor) -> Tensor:
    """Multiply x (rows, inner) by the transpose of w (columns, inner) with oneDNN."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return made


def by_mkl(x: Tensor, w: Tensor) -> Tensor:
    """Multiply the same with MKL."""
    return torch.mm(x, w.t())


def in_turns(x: Tensor, w: Tensor) -> tuple[float, float]:
    """Return the median time of MKL's and of oneDNN's product, in seconds."""
    by_onednn(x, w)
    turns, times = 7, (array("d"), array("d"))
    while len(times[0]) < turns:
        for product, own in zip((by_mkl, by_onednn), times):
            began = time.perf_counter()
            product(x, w)
            own.append(time.perf_counter() - began)
        turns = max(7, min(200, round(_SECONDS / times[0][0])))
    return median(times[0]), median(times[1])


if __name__ == "__main__":
    main()

"""Random graphs with collectives of several groups: data dependencies, views, writes, random numbers, dead code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.torch_compat.fake_tensors import FakeTensorMode

c10d = torch.ops._c10d_functional
ROWS, COLUMNS = 4, 3
# Ranks by group. Operators keep shapes, so that any can follow any.
GROUPS = {"dp": 2, "tp": 2}
Step = tuple[str, int, int]
KINDS = (
    *("gather", "gather", "reduce", "all_reduce", "all_to_all", "coalesced", "twice", "nested"),
    *("mm", "relu", "add", "view", "cast", "mul"),
    *("write", "copy_input", "random", "dead", "dead_wait"),
)


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Draw operators with two choices each: the inputs and the group."""
    step = st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30))
    return draw(st.lists(step, min_size=1, max_size=25))


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(4)]


def program(chosen: list[Step], groups: dict[str, int]) -> Callable[..., list[torch.Tensor]]:
    """Return a function that runs these steps, and returns the last values and some in between."""
    names = list(groups)

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        values = list(given)
        for kind, one, other in chosen:
            x, y, name = values[-1 - one % len(values)], values[-1 - other % len(values)], names[other % len(names)]
            values += _step(kind, x, y, name, groups[name], list(given))
        return [*values[len(given) :][-4:], *values[len(given) :][::5]]

    return run


def _step(
    kind: str, x: torch.Tensor, y: torch.Tensor, group: str, size: int, given: list[torch.Tensor]
) -> list[torch.Tensor]:
    wait = c10d.wait_tensor
    if kind == "gather":
        return [wait(c10d.all_gather_into_tensor(x.contiguous(), size, group))[:ROWS]]
    if kind == "reduce":
        whole = torch.cat([x] * size)
        return [wait(c10d.reduce_scatter_tensor(whole, "sum", size, group))]
    if kind == "all_reduce":
        return [wait(c10d.all_reduce(x.clone(), "sum", group)) * 0.25]
    if kind == "all_to_all":
        return [wait(c10d.all_to_all_single(x.contiguous(), [ROWS // size] * size, [ROWS // size] * size, group))]
    if kind == "coalesced":
        fulls = c10d.all_gather_into_tensor_coalesced([x.contiguous(), y.contiguous()], size, group)
        return [wait(full)[:ROWS] for full in fulls]
    if kind == "twice":
        full = wait(c10d.all_gather_into_tensor((x * 0.5).contiguous(), size, group))
        return [full[:ROWS], full[-ROWS:] + 1]
    if kind == "nested":
        inner = wait(c10d.all_gather_into_tensor(x.contiguous(), size, group))
        return [wait(c10d.reduce_scatter_tensor(inner.clone(), "avg", size, group))]
    if kind == "mm":
        return [torch.tanh(x @ y.t() @ x)]
    if kind == "relu":
        return [x.relu()]
    if kind == "add":
        return [x * 0.5 + y]
    if kind == "mul":
        return [torch.tanh(x * y)]
    if kind == "view":
        return [x.view(-1)[: ROWS * COLUMNS].view(ROWS, COLUMNS) if x.is_contiguous() else x.clone()]
    if kind == "cast":
        return [x.to(torch.float64).to(torch.float32)]
    if kind == "write":
        x.add_(0.125)
        return [x]
    if kind == "copy_input":
        given[0].copy_(torch.tanh(y))
        return []
    if kind == "random":
        return [x + torch.rand_like(x)]
    if kind == "dead":
        (x * 3).view(-1)
        return []
    assert kind == "dead_wait"
    wait(c10d.all_reduce(x.clone(), "sum", group))
    return []


def graph(chosen: list[Step], groups: dict[str, int] = GROUPS, given: list[torch.Tensor] | None = None) -> GraphModule:
    """Trace a program without dead code elimination; fake tensors of one mode show identical inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (given or inputs())]
        return make_fx(program(chosen, groups))(*fakes)

"""Folding the text of deep programs."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from graphshard.ir.collapse_repeats import fold
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from tests.helpers import COALESCED, captured, through


class _Block(nn.Module):
    """A block that contains all computation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class _Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@functools.cache
def _program(depth: int, stage: str) -> Program:
    return through(captured(_Deep(depth), (torch.ones(3, 4),)), stage, planner=COALESCED)


def test_a_scheduled_program() -> None:
    """Blocks with equal starts, compute and results are printed once; the first and last stay."""
    assert_expected_inline(
        fold(print_program(_program(8, "reorder"))),
        """\
forward:
  %0: f32[2, 4] = param:layers.0.linear.weight
  ... layers.1 to layers.7: 7 times 1 lines like layers.0
  %8: f32[3, 4] = input:0
* %10: f32[4, 4] = all_gather_into_tensor(%0, 2, shard)  # layers.0.linear [gather layers.0 in forward]
  %11: f32[4, 4] = wait_tensor(%10)  # layers.0.linear [gather layers.0 in forward]
  %12: f32[4, 4] = t(%11)  # layers.0.linear
* %16: f32[4, 4] = all_gather_into_tensor(%1, 2, shard)  # layers.1.linear [gather layers.1 in forward]
  %13: f32[3, 4] = mm(%8, %12)  # layers.0.linear
  %14: f32[3, 4] = relu(%13)  # layers.0
  %17: f32[4, 4] = wait_tensor(%16)  # layers.1.linear [gather layers.1 in forward]
  %18: f32[4, 4] = t(%17)  # layers.1.linear
* %22: f32[4, 4] = all_gather_into_tensor(%2, 2, shard)  # layers.2.linear [gather layers.2 in forward]
  %19: f32[3, 4] = mm(%14, %18)  # layers.1.linear
  %20: f32[3, 4] = relu(%19)  # layers.1
  %23: f32[4, 4] = wait_tensor(%22)  # layers.2.linear [gather layers.2 in forward]
  %24: f32[4, 4] = t(%23)  # layers.2.linear
  ... layers.3 to layers.6: 4 times 5 lines like layers.2
* %52: f32[4, 4] = all_gather_into_tensor(%7, 2, shard)  # layers.7.linear [gather layers.7 in forward]
  %49: f32[3, 4] = mm(%44, %48)  # layers.6.linear
  %50: f32[3, 4] = relu(%49)  # layers.6
  %53: f32[4, 4] = wait_tensor(%52)  # layers.7.linear [gather layers.7 in forward]
  %54: f32[4, 4] = t(%53)  # layers.7.linear
  %55: f32[3, 4] = mm(%50, %54)  # layers.7.linear
  %56: f32[3, 4] = relu(%55)  # layers.7
  %57: f32[3, 4] = detach(%56)  # layers.7
  %58: f32[] = sum(%56)
  %60: f32[3, 4] = detach(%57)  # layers.7
  return %58 as output:0
  return %1 as param:layers.1.linear.weight
  ... layers.2 to layers.7: 6 times 1 lines like layers.1
  return %8 as input:0
  return %14 as saved  # layers.0
  ... layers.1 to layers.6: 6 times 1 lines like layers.0
  return %60 as saved  # layers.7

backward:
  %1: f32[2, 4] = param:layers.1.linear.weight
  ... layers.2 to layers.7: 6 times 1 lines like layers.1
  %8: f32[3, 4] = input:0
  %14: f32[3, 4] = saved  # layers.0
  ... layers.1 to layers.7: 7 times 1 lines like layers.0
  %9: f32[] = tangent:0
* %52: f32[4, 4] = all_gather_into_tensor(%7, 2, shard)  # layers.7.linear [gather layers.7 in backward]
  %59: f32[3, 4] = expand(%9, [3, 4])
  %61: f32[3, 4] = threshold_backward(%59, %60, 0)  # layers.7
  %62: f32[4, 3] = t(%61)  # layers.7.linear
  %63: f32[4, 4] = mm(%62, %50)  # layers.7.linear
  %64: f32[4, 4] = t(%63)  # layers.7.linear
  %67: f32[4, 4] = t(%64)  # layers.7.linear
* %68: f32[2, 4] = reduce_scatter_tensor(%67, avg, 2, shard)  # [reduce layers.7 in backward]
  %53: f32[4, 4] = wait_tensor(%52)  # layers.7.linear [gather layers.7 in backward]
  %54: f32[4, 4] = t(%53)  # layers.7.linear
  %65: f32[4, 4] = t(%54)  # layers.7.linear
* %46: f32[4, 4] = all_gather_into_tensor(%6, 2, shard)  # layers.6.linear [gather layers.6 in backward]
  %66: f32[3, 4] = mm(%61, %65)  # layers.7.linear
  %51: f32[3, 4] = detach(%50)  # layers.6
  %70: f32[3, 4] = detach(%51)  # layers.6
  %71: f32[3, 4] = threshold_backward(%66, %70, 0)  # layers.6
  %72: f32[4, 3] = t(%71)  # layers.6.linear
  %73: f32[4, 4] = mm(%72, %44)  # layers.6.linear
  %69: f32[2, 4] = wait_tensor(%68)  # [reduce layers.7 in backward]
  %74: f32[4, 4] = t(%73)  # layers.6.linear
  %77: f32[4, 4] = t(%74)  # layers.6.linear
* %78: f32[2, 4] = reduce_scatter_tensor(%77, avg, 2, shard)  # [reduce layers.6 in backward]
  %47: f32[4, 4] = wait_tensor(%46)  # layers.6.linear [gather layers.6 in backward]
  %48: f32[4, 4] = t(%47)  # layers.6.linear
  %75: f32[4, 4] = t(%48)  # layers.6.linear
* %40: f32[4, 4] = all_gather_into_tensor(%5, 2, shard)  # layers.5.linear [gather layers.5 in backward]
  %76: f32[3, 4] = mm(%71, %75)  # layers.6.linear
  %45: f32[3, 4] = detach(%44)  # layers.5
  %80: f32[3, 4] = detach(%45)  # layers.5
  %81: f32[3, 4] = threshold_backward(%76, %80, 0)  # layers.5
  %82: f32[4, 3] = t(%81)  # layers.5.linear
  %83: f32[4, 4] = mm(%82, %38)  # layers.5.linear
  %79: f32[2, 4] = wait_tensor(%78)  # [reduce layers.6 in backward]
  %84: f32[4, 4] = t(%83)  # layers.5.linear
  %87: f32[4, 4] = t(%84)  # layers.5.linear
* %88: f32[2, 4] = reduce_scatter_tensor(%87, avg, 2, shard)  # [reduce layers.5 in backward]
  %41: f32[4, 4] = wait_tensor(%40)  # layers.5.linear [gather layers.5 in backward]
  %42: f32[4, 4] = t(%41)  # layers.5.linear
  %85: f32[4, 4] = t(%42)  # layers.5.linear
  ... layers.4 to layers.2: 3 times 14 lines like layers.5
* %16: f32[4, 4] = all_gather_into_tensor(%1, 2, shard)  # layers.1.linear [gather layers.1 in backward]
  %116: f32[3, 4] = mm(%111, %115)  # layers.2.linear
  %21: f32[3, 4] = detach(%20)  # layers.1
  %120: f32[3, 4] = detach(%21)  # layers.1
  %121: f32[3, 4] = threshold_backward(%116, %120, 0)  # layers.1
  %122: f32[4, 3] = t(%121)  # layers.1.linear
  %123: f32[4, 4] = mm(%122, %14)  # layers.1.linear
  %119: f32[2, 4] = wait_tensor(%118)  # [reduce layers.2 in backward]
  %124: f32[4, 4] = t(%123)  # layers.1.linear
  %127: f32[4, 4] = t(%124)  # layers.1.linear
* %128: f32[2, 4] = reduce_scatter_tensor(%127, avg, 2, shard)  # [reduce layers.1 in backward]
  %17: f32[4, 4] = wait_tensor(%16)  # layers.1.linear [gather layers.1 in backward]
  %18: f32[4, 4] = t(%17)  # layers.1.linear
  %125: f32[4, 4] = t(%18)  # layers.1.linear
  %126: f32[3, 4] = mm(%121, %125)  # layers.1.linear
  %15: f32[3, 4] = detach(%14)  # layers.0
  %130: f32[3, 4] = detach(%15)  # layers.0
  %131: f32[3, 4] = threshold_backward(%126, %130, 0)  # layers.0
  %132: f32[4, 3] = t(%131)  # layers.0.linear
  %133: f32[4, 4] = mm(%132, %8)  # layers.0.linear
  %129: f32[2, 4] = wait_tensor(%128)  # [reduce layers.1 in backward]
  %134: f32[4, 4] = t(%133)  # layers.0.linear
  %135: f32[4, 4] = t(%134)  # layers.0.linear
* %136: f32[2, 4] = reduce_scatter_tensor(%135, avg, 2, shard)  # [reduce layers.0 in backward]
  %137: f32[2, 4] = wait_tensor(%136)  # [reduce layers.0 in backward]
  return %137 as grad:layers.0.linear.weight
  return %129 as grad:layers.1.linear.weight
  return %119 as grad:layers.2.linear.weight
  ... layers.3 to layers.7: 5 times 1 lines like layers.2
""",
    )


@pytest.mark.parametrize("stage", ["insert-collectives", "partition", "bucket", "reorder"])
@pytest.mark.slow
def test_the_length_does_not_depend_on_the_depth(stage: str) -> None:
    folded = [len(fold(print_program(_program(depth, stage))).splitlines()) for depth in (8, 16)]
    assert folded[0] == folded[1]
    assert len(print_program(_program(16, stage)).splitlines()) > 1.8 * folded[1]


def test_nothing_to_fold() -> None:
    text = print_program(_program(2, "reorder"))
    assert fold(text) == text


def test_a_block_that_differs_is_shown() -> None:
    """A relu of another shape: its block is not folded."""
    program = _program(8, "partition")
    text = print_program(program)
    lines = text.splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if "mm(" in line and "layers.4" in line)
    odd = lines[index].replace("mm(", "odd(")
    lines[index] = odd
    folded = fold("".join(lines))
    assert odd in folded
    assert odd.replace("odd(", "mm(") not in folded
    assert fold(text) != folded


class _Alternating(nn.Module):
    """Two kinds of blocks in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def test_alternating_blocks() -> None:
    """Groups of blocks that repeat are folded, too."""
    folded = fold(print_program(through(captured(_Alternating(), (torch.ones(3, 4),)), "partition")))
    assert "  ... layers.2 to layers.11: 5 times 3 lines like layers.0 to layers.1\n" in folded


def test_folding_is_stable() -> None:
    """Folded text folds to itself, so a dump may be folded again."""
    folded = fold(print_program(_program(8, "reorder")))
    assert fold(folded) == folded

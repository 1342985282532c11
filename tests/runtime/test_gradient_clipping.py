"""Gradient clipping keeps gradients until their norm is known."""

from __future__ import annotations

import torch
from torch import nn

from graphshard.runtime.optimizer_updates import Clipping, placed_alike
from graphshard.runtime.step_overlap import Arrival


def test_gradients_are_given_back() -> None:
    """As backward would have left them, once."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    clipping = Clipping(1.0)
    clipping.take([Arrival(param, torch.full((2,), float(n))) for n, param in enumerate(params[:2])])
    clipping.take([Arrival(params[2], torch.full((2,), 2.0))])
    clipping.give_back()
    assert [param.grad.tolist() for param in params] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    for param in params:
        param.grad = None
    clipping.give_back()
    assert all(param.grad is None for param in params)


def test_plain_tensors_are_left_to_torch() -> None:
    assert not placed_alike([nn.Parameter(torch.zeros(2))])

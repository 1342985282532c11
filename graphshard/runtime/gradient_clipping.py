"""Clip gradients by their total norm, when each of them has arrived at another time.

The norm of a shard is computed where its gradient arrives, under the reductions of others. One all-reduce of as many
numbers as there are parameters makes the total, with the sums and in the order of `torch.nn.utils.get_total_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from graphshard.runtime.gradient_ready import Arrival
from graphshard.torch_compat.dtensor import dtensor_of, sharded_like
from graphshard.torch_compat.operators import foreach_mul, foreach_norm


def placed_alike(params: Sequence[nn.Parameter]) -> bool:
    """Whether parameters are DTensors on one mesh, all placed the same way and of one dtype and device."""
    first = params[0]
    if not isinstance(first, DTensor):
        return False
    like = (first.device_mesh, first.placements, first.dtype, first.device)
    return all(isinstance(p, DTensor) and (p.device_mesh, p.placements, p.dtype, p.device) == like for p in params)


class Clipping:
    """Gradients of one step, kept until all of them and so their norm are known.

    Args:
        max_norm: what the total norm may be at most.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._groups: list[list[Arrival]] = []
        self._placed: tuple[Placement, ...] = ()
        self._placements: tuple[Placement, ...] | None = None

    @torch.no_grad()
    def take(self, arrivals: list[Arrival]) -> None:
        """Keep gradients, and compute the norms of these shards of them."""
        grads = [grad for _, grad in arrivals]
        self._norms.update(zip((param for param, _ in arrivals), foreach_norm(grads, 2.0)))
        self._groups.append(arrivals)

    @torch.no_grad()
    def end(
        self, params: Iterable[nn.Parameter], is_late: Callable[[list[Arrival]], bool] = bool
    ) -> tuple[torch.Tensor, Iterable[list[Arrival]]]:
        """The total norm, and the clipped gradients in the groups in which they arrived.

        Args:
            params: all that have one, in the order in which norms are added up.
            is_late: of a group, whether it comes behind those of which this is False.
        """
        chosen = [param for param in params if param in self._norms]
        if not chosen:  # all are added up without communication
            return torch.tensor(0.0), []
        first = chosen[0]
        assert isinstance(first, DTensor)
        if self._placements is None or self._placed != first.placements:
            self._placed = first.placements
            self._placements = _placements_of_norm(first)
        stacked = torch.stack([self._norms[param] for param in chosen])
        norms = dtensor_of(stacked, first.device_mesh, self._placements, stacked.shape, stacked.stride())
        total = torch.linalg.vector_norm(norms, 2.0).full_tensor()
        factor = torch.clamp(self._max_norm / (total + 1e-6), max=1.0)
        groups = sorted(self._groups, key=is_late)
        self.forget()
        return total, (_scaled(group, factor) for group in groups)

    def give_back(self) -> None:
        """Let parameters have the gradients that were kept, as backward would."""
        for param, grad in (arrival for group in self._groups for arrival in group):
            param.grad = sharded_like(grad, param) if isinstance(param, DTensor) else grad
        self.forget()

    def forget(self) -> None:
        """What a backward has left that did not come to its end."""
        self._groups = []
        self._norms.clear()


def _scaled(arrivals: list[Arrival], factor: torch.Tensor) -> list[Arrival]:
    scaled = foreach_mul([grad for _, grad in arrivals], factor)
    return [Arrival(param, grad) for (param, _), grad in zip(arrivals, scaled)]


def _placements_of_norm(param: DTensor) -> tuple[Placement, ...]:
    """How torch places the norm of a gradient: a part of it on each rank that has a part of the gradient."""
    return tuple(torch.linalg.vector_norm(sharded_like(param._local_tensor, param), 2.0).placements)

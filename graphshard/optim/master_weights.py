"""Optimizers that update float32 copies of parameters in 16 bits, on the device or on the host."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.operators import DOWNLOAD, copied_to, copies_so_far
from graphshard.ir.subclasses import is_extended, shard_in
from graphshard.ir.tensor_memory import bit_sums
from graphshard.optim._owners import Box, boxes_of, part
from graphshard.optim._wrapped import check_hooks, check_wrapped
from graphshard.optim.matrix_optimizer import MatrixOptimizer
from graphshard.torch_compat.dtensor import dtensor_of
from graphshard.utils.argument_validation import check_choice, check_count, check_number

MASTER = "master_weight"
_MASK = 0xFFFFFFFF
_ROUNDING_STEP = "rounding_step"

Number = TypeVar("Number", int, torch.Tensor)
# Runs work when copies to and from a device that have been started are complete.
Later: TypeAlias = Callable[[Callable[[], None], torch.device], None]


@dataclass(eq=False)
class Master:
    """What the wrapped optimizer updates in place of a parameter.

    Attributes:
        tensor: the parameter itself, or its copy in float32.
        on_host: the copy is in host memory.
        kept: the copy has a value between steps.
        number: of the parameter, counted through all groups.
        group: number of its group.
        sums: of the bits of the shard that the last step wrote, for copies on the host.
    """

    param: torch.Tensor
    tensor: torch.Tensor
    on_host: bool
    kept: bool
    number: int
    group: int
    sums: torch.Tensor | None = None

    @property
    def is_copy(self) -> bool:
        return self.tensor is not self.param

    @functools.cached_property
    def box(self) -> Box:
        """Return which part of the parameter this rank has."""
        param = self.param
        if not isinstance(param, DTensor):
            return tuple((0, size) for size in param.shape)
        mesh, place = param.device_mesh, param.device_mesh.get_coordinate()
        assert place is not None
        rank = functools.reduce(lambda rank, pair: rank * pair[0] + pair[1], zip(mesh.shape, place), 0)
        return boxes_of(tuple(param.shape), tuple(mesh.shape), tuple(param.placements))[rank]


class MasterWeights(Optimizer):
    """Wrapper of an optimizer that updates float32 copies of the parameters, its master weights, and rounds them.

        model = graphshard.compile(model.to(torch.bfloat16), mesh)
        optimizer = graphshard.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=3e-4))

    The optimizer's state is float32, too. The same copies of an unsharded model have the same bits. State dicts contain
    each copy as "master_weight", a DTensor.

    Who writes to a parameter writes to its copy: a step starts from the parameter where the two no longer round to the
    same.

    `compile_step` updates copies in backward, as gradients arrive; those on the host in another thread.

    Args:
        optimizer: that has not made a step. Train with the wrapper only.
        rounding: "nearest", or "stochastic": up or down with the probability that keeps the expected value, for
            parameters in bfloat16. They then need no copies between steps, so that they and Adam's state take 10 bytes
            per element instead of 14. Which way an element is rounded depends on `seed`, the step, and its place in the
            parameter: replicas stay equal, and other numbers of ranks round alike.
        seed: of stochastic rounding.
        host_fraction: the part of all elements, from the last parameter on, whose copies and state are in host memory
            and are updated there. Each step moves their gradients to the host and their values back.

    Raises:
        ArgumentError: `optimizer` is not an optimizer, or has state; another argument is wrong.
        UnsupportedError: it needs a closure; a parameter is a tensor subclass; it is not bfloat16 and rounded
            stochastically; a MatrixOptimizer's matrices would be on the host; from `step`, a hook is registered on the
            wrapped optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, *, rounding: str = "nearest", seed: int = 0, host_fraction: float = 0.0
    ) -> None:
        check_wrapped(optimizer, self, "torch.optim.AdamW")
        check_choice("rounding", rounding, ("nearest", "stochastic"))
        check_count("seed", seed, least=0)
        check_number("host_fraction", host_fraction, example="0.5")
        if host_fraction > 1:
            raise ArgumentError(f"host_fraction must be a part of all elements, at most 1, got {host_fraction}.")
        if isinstance(optimizer, MatrixOptimizer) and host_fraction:
            raise UnsupportedError(
                "MasterWeights: host_fraction: owners of a MatrixOptimizer exchange matrices on the device. Leave "
                "host_fraction at 0, or make one optimizer for the matrices and one for the other parameters."
            )
        state = optimizer.state_dict()["state"].values()
        if any(isinstance(value, torch.Tensor) and value.ndim for values in state for value in values.values()):
            raise ArgumentError(
                f"MasterWeights: {type(optimizer).__name__} has made a step. Wrap it before the first one, and load "
                "its state into the wrapper."
            )
        self._stochastic, self._seed = rounding == "stochastic", seed
        self._masters: dict[torch.Tensor, Master] = {}
        self._rounded: list[tuple[Master, torch.Tensor]] = []
        groups = optimizer.param_groups
        self._left_on_device = (1 - host_fraction) * sum(p.numel() for group in groups for p in group["params"])
        self._wrapped: Optimizer | None = None
        super().__init__(groups, optimizer.defaults)
        if isinstance(optimizer, MatrixOptimizer):
            self._wrapped = optimizer.with_params({each.param: each.tensor for each in self._masters.values()})
        else:
            self._wrapped = optimizer
            optimizer.param_groups = [self._on_copies(group) for group in self.param_groups]
            known = {self._masters[param].tensor: values for param, values in optimizer.state.items()}
            optimizer.state = defaultdict(dict, known)

    def __repr__(self) -> str:
        return f"MasterWeights({self.wrapped!r})"

    def __contains__(self, param: torch.Tensor) -> bool:
        """Return whether the optimizer has a parameter."""
        return param in self._masters

    @property
    def wrapped(self) -> Optimizer:
        """Return the optimizer that updates the copies."""
        assert self._wrapped is not None
        return self._wrapped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and copy them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self._stochastic:
            group.setdefault(_ROUNDING_STEP, 0)
        for number, param in enumerate(group["params"]):
            self._masters[param] = self._master(param, number)
        if self._wrapped is not None:
            self._wrapped.add_param_group(self._on_copies(group))

    def _on_copies(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._masters[param].tensor for param in group["params"]]}

    @torch.no_grad()
    def _master(self, param: torch.Tensor, number: int) -> Master:
        shard, group = shard_in(param).detach(), len(self.param_groups) - 1
        which = f"parameter {number} of group {group}, of shape {list(param.shape)},"
        if is_extended(param):
            raise UnsupportedError(
                f"MasterWeights: {which} is a {type(shard).__name__}, which a float32 copy would not be. Leave it to "
                "another optimizer."
            )
        low = param.dtype in (torch.bfloat16, torch.float16)
        if self._stochastic and param.dtype is torch.float16:
            raise UnsupportedError(
                f"MasterWeights: rounding='stochastic': {which} is float16, and only bfloat16 has the exponents of "
                "float32, of which it is a part. Take rounding='nearest', or model.to(torch.bfloat16)."
            )
        on_host = self._left_on_device < param.numel() / 2
        self._left_on_device -= param.numel()
        tensor = param
        if low or on_host:
            device = torch.device("cpu") if on_host else shard.device
            local = shard.to(device, torch.float32 if low else param.dtype, copy=True)
            tensor = _like(local, param)
        master = Master(param, tensor, on_host, not (low and self._stochastic), len(self._masters), group)
        if on_host and master.kept:
            master.sums = bit_sums(shard).cpu()
        if not master.kept:
            shard_in(tensor).untyped_storage().resize_(0)
        return master

    # --- the step ----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the copies of all parameters that have gradients, and round them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        works: list[tuple[Callable[[], None], Callable[[], None]]] = []
        arrivals = [(param, shard_in(param.grad)) for param in self._masters if param.grad is not None]
        self.take(arrivals, self._step, lambda work, device: works.append((copies_so_far(device), work)))
        for ready, work in works:
            ready()
            work()
        self.finish()
        return loss

    def begin(self) -> None:
        """Take over learning rates and other settings of the groups."""
        check_hooks(self.wrapped, self)
        self._rounded.clear()
        for group, own in zip(self.param_groups, self.wrapped.param_groups):
            own.update((name, value) for name, value in group.items() if name != "params")

    @torch.no_grad()
    def take(
        self,
        arrivals: Iterable[tuple[torch.Tensor, torch.Tensor]],
        run: Callable[[list[tuple[Master, torch.Tensor]]], None],
        later: Later,
    ) -> list[torch.Tensor]:
        """Update parameters, given local tensors of their gradients; return which have been updated.

        Args:
            run: updates copies by local tensors of gradients in their dtype.
            later: runs the update of copies on the host.
        """
        self._upload()
        here: list[tuple[Master, torch.Tensor]] = []
        host: list[tuple[Master, torch.Tensor]] = []
        for param, grad in arrivals:
            master = self._masters[param]
            (host if master.on_host else here).append((master, grad))
        downloads = [_Download(master, grad) for master, grad in host]
        if here:
            copied = [(m, grad.to(m.tensor.dtype)) for m, grad in here]
            for master, _ in copied:
                self._refresh(master, shard_in(master.param).detach())
            run(copied)
            for master, _ in here:
                if master.is_copy:
                    shard_in(master.param).detach().copy_(self._round(master))
        if downloads:

            def update() -> None:
                for each in downloads:
                    if each.sums is None or each.master.sums is None or not torch.equal(each.sums, each.master.sums):
                        self._refresh(each.master, each.value())
                run([(each.master, each.grad.to(each.master.tensor.dtype)) for each in downloads])
                for each in downloads:
                    rounded = self._round(each.master)
                    each.master.sums = bit_sums(rounded) if each.master.kept else None
                    self._rounded.append((each.master, rounded))

            later(update, shard_in(host[0][0].param).device)
        return [master.param for master, _ in here]

    @torch.no_grad()
    def finish(self) -> None:
        """Write to the parameters whose copies are on the host, and take over what the step changed in the groups."""
        self._upload()
        for group, own in zip(self.param_groups, self.wrapped.param_groups):
            group.update((name, value) for name, value in own.items() if name != "params")
            if self._stochastic:
                group[_ROUNDING_STEP] += 1
        if len(self.state) != len(self.wrapped.state):
            self._show_state()

    def _step(self, members: Sequence[tuple[Master, torch.Tensor]]) -> None:
        """Run the wrapped optimizer's step for some copies, on DTensors."""
        given = {master.tensor for master, _ in members}
        groups = self.wrapped.param_groups
        everything = [group["params"] for group in groups]
        for master, grad in members:
            if master.is_copy:
                master.tensor.grad = _like(grad, master.tensor)
        try:
            for group in groups:
                group["params"] = [tensor for tensor in group["params"] if tensor in given]
            self.wrapped.step()
        finally:
            for group, params in zip(groups, everything):
                group["params"] = params
            for master, _ in members:
                if master.is_copy:
                    master.tensor.grad = None

    def _refresh(self, master: Master, value: torch.Tensor) -> None:
        """Take over a parameter's value where something else than the last step has written it."""
        if not master.is_copy:
            return
        local = shard_in(master.tensor)
        if not master.kept:
            local.untyped_storage().resize_(local.numel() * local.element_size())
            local.copy_(value)
        else:
            torch.where(local.to(value.dtype) == value, local, value.to(local.dtype), out=local)

    def _round(self, master: Master) -> torch.Tensor:
        """Return a copy in the parameter's dtype."""
        local = shard_in(master.tensor)
        if master.kept:
            return local.to(master.param.dtype)
        step = self.param_groups[master.group][_ROUNDING_STEP]
        key = _mixed(_mixed(_mixed(self._seed & _MASK) ^ step) ^ master.number)
        rounded = round_stochastically(local, master.box, tuple(master.param.shape), key)
        local.untyped_storage().resize_(0)
        return rounded

    def _upload(self) -> None:
        """Write to parameters what has been computed on the host."""
        while self._rounded:
            master, rounded = self._rounded.pop(0)
            shard = shard_in(master.param).detach()
            shard.copy_(copied_to([rounded], shard.device)[0])

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state and the copies; for a MatrixOptimizer all ranks call this together."""
        state = {number: dict(values) for number, values in self.wrapped.state_dict()["state"].items()}
        for master in self._masters.values():
            if master.is_copy and master.kept:
                state.setdefault(master.number, {})[MASTER] = master.tensor
        params = list(self._masters)
        self.state = defaultdict(dict, {params[number]: values for number, values in state.items()})
        try:
            return super().state_dict()
        finally:
            self._show_state()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. A copy that it does not contain, or that does not round to the parameter, starts from there."""
        super().load_state_dict({**state_dict, "state": {}})
        state = {key: dict(values) for key, values in state_dict["state"].items()}
        keys = (key for group in state_dict["param_groups"] for key in group["params"])  # DCP's are names
        for key, master in zip(keys, self._masters.values()):
            value = state.get(key, {}).pop(MASTER, None)
            if not (master.is_copy and master.kept):
                continue
            master.sums = None  # compares it with the parameter
            local = shard_in(master.tensor)
            if value is None:
                local.copy_(shard_in(master.param).detach())
            else:
                local.copy_(shard_in(value) if isinstance(value, DTensor) else part(value, master.box))
        groups = [
            {**group, "params": saved["params"]} for group, saved in zip(self.param_groups, state_dict["param_groups"])
        ]
        self.wrapped.load_state_dict({"state": state, "param_groups": groups})
        self._show_state()

    def _show_state(self) -> None:
        """Show the state of each copy as its parameter's."""
        state = self.wrapped.state
        shown = {param: state[each.tensor] for param, each in self._masters.items() if each.tensor in state}
        self.state = defaultdict(dict, shown)


class _Download:
    """What the update of a copy on the host reads from the device: it is on its way."""

    def __init__(self, master: Master, grad: torch.Tensor) -> None:
        shard = shard_in(master.param).detach()
        self.master, self.grad = master, DOWNLOAD(grad)
        self.sums = DOWNLOAD(bit_sums(shard)) if master.kept else None
        self._shard = shard if master.kept else DOWNLOAD(shard)

    def value(self) -> torch.Tensor:
        """Return the parameter's shard, in host memory."""
        return self._shard.cpu()


def _like(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is placed as the parameter is."""
    if not isinstance(param, DTensor):
        return local
    return dtensor_of(local, param.device_mesh, param.placements, param.shape, param.stride())


# --- stochastic rounding ---------------------------------------------------------------------------------------------


def round_stochastically(value: torch.Tensor, box: Box, shape: Sequence[int], key: int) -> torch.Tensor:
    """Return float32 as bfloat16, each element rounded up with a probability equal to its distance from below.

    The 16 bits that bfloat16 lacks get a uniform number of 16 bits added, and are cut off. That number is a hash of
    the element's place in the whole tensor.

    Args:
        value: part of a tensor.
        box: which part.
        shape: of the whole tensor.
        key: below 2^32, another one for each tensor and step.
    """
    place = torch.zeros((), dtype=torch.int64, device=value.device)
    for (start, length), size in zip(box, shape):
        place = place.unsqueeze(-1) * size + torch.arange(start, start + length, device=value.device)
    noise = _mixed((place ^ (place >> 32) * 0x9E3779B1) & _MASK ^ key) & 0xFFFF
    bits = (value.contiguous().view(torch.int32) + noise.to(torch.int32)) & -0x10000
    return torch.where(value.isfinite(), bits.view(torch.float32), value).to(torch.bfloat16)


def _mixed(number: Number) -> Number:
    """Return a hash of numbers below 2^32, of as many bits (Wellons, lowbias32, 2018)."""
    number = (number ^ (number >> 16)) * 0x7FEB352D & _MASK
    number = (number ^ (number >> 15)) * 0x846CA68B & _MASK
    return number ^ (number >> 16)

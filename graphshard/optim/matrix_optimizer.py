"""An optimizer whose updates each run on one rank, on whole parameters."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from graphshard.errors import ArgumentError, UnsupportedError
from graphshard.ir.subclasses import carry_attributes, is_extended, shard_in
from graphshard.optim._owners import Owned, OwnerGroup, OwnerTransfer, boxes_of, longest_first
from graphshard.optim._wrapped import check_hooks, check_wrapped
from graphshard.torch_compat.dtensor import cuts_of, dtensor_of
from graphshard.utils.argument_validation import check_function

# Results travel in so many parts, each under the computation of the next.
_ROUNDS = 4


def newton_schulz_flops(shape: torch.Size) -> float:
    """Return the operations of one iteration of Muon's for a matrix, or batch of matrices; elements of a vector.

    For m x n with m <= n: `x @ x.T`, its square and their product with `x` (Jordan et al., Muon, 2024).
    """
    if len(shape) < 2:
        return float(shape.numel())
    small, large = sorted(shape[-2:])
    return float(shape[:-2].numel() * (4 * small * small * large + 2 * small**3))


@dataclass(eq=False)
class _Piece:
    """A parameter, or some of a batch of matrices, that one rank updates.

    Attributes:
        group: None if every rank has the parameter whole.
        batched: it is a part of a batch.
        state: the optimizer's, at the owner.
    """

    param: torch.Tensor
    group: OwnerGroup | None = None
    owned: Owned | None = None
    batched: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def owner(self) -> tuple[OwnerGroup, int] | None:
        """Return the rank that updates it; None for each rank."""
        return None if self.group is None or self.owned is None else (self.group, self.owned.owner)

    @property
    def is_mine(self) -> bool:
        """Return whether this rank updates it."""
        return self.group is None or self.owner == (self.group, self.group.rank)

    def like(self, tensor: DTensor) -> Owned:
        """Return the owned part of a tensor of the state, given how ranks hold it."""
        assert self.owned is not None
        owned = replace(self.owned, shape=tuple(tensor.shape), placements=tuple(tensor.placements))
        return owned if self.batched else replace(owned, length=tensor.shape[0] if tensor.ndim else 1)


class _Arrived(NamedTuple):
    """Pieces that are on their way to their owners with their gradients, or that every rank has."""

    pieces: Sequence[_Piece]
    values: OwnerTransfer | Sequence[torch.Tensor]
    grads: OwnerTransfer | Sequence[torch.Tensor]


class MatrixOptimizer(Optimizer):
    """Wrapper of an optimizer that needs whole matrices: one rank, its owner, updates each parameter.

        muon = torch.optim.Muon([p for p in model.layers.parameters() if p.ndim == 2], lr=0.02)
        optimizer = graphshard.optim.MatrixOptimizer(muon)

    The optimizer's own step runs on plain whole parameters and gradients. Results have the bits of the unsharded model,
    and no product is computed twice. The owner has the state of a parameter. State dicts contain DTensors, as from the
    wrapped optimizer, and load with other numbers of ranks. All ranks must call `state_dict` and `load_state_dict`
    together.

    `compile_step` starts to send gradients in backward, as they are reduced.

    Args:
        optimizer: any whose step treats each parameter by itself. Train with the wrapper only; parameter groups are the
            same objects in both.
        batches: parameters whose first dim counts independent matrices, such as the weights (E, m, n) of E experts.
            Several ranks own such a parameter, and the optimizer's step gets batches (e, m, n).
        cost: returns the work of an update by the parameter's shape, in any unit. Owners are chosen so that all ranks
            have the same work. The default is the number of operations of Newton-Schulz iterations.

    Raises:
        ArgumentError: `optimizer` is not an optimizer, or has been wrapped before; `batches` are not its parameters.
        UnsupportedError: it needs a closure, or a parameter is a tensor subclass or not reduced; from `step`, a hook is
            registered on the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        batches: Iterable[torch.Tensor] = (),
        cost: Callable[[torch.Size], float] | None = None,
    ) -> None:
        check_wrapped(optimizer, self, "torch.optim.Muon")
        if cost is not None:
            check_function("cost", cost, "lambda shape: shape.numel()")
        self._wrapped, self._cost, self._batches = optimizer, cost or newton_schulz_flops, set(batches)
        self._groups: dict[DeviceMesh, OwnerGroup] = {}
        self._pieces: dict[torch.Tensor, list[_Piece]] = {}
        self._arrived: list[_Arrived] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for param in self._batches:
            if param not in self._pieces or param.ndim < 3:
                what = "is not a parameter of the optimizer" if param not in self._pieces else "is no batch of matrices"
                raise ArgumentError(f"batches: a tensor of shape {list(param.shape)} {what}.")
        optimizer.param_groups, self.state = self.param_groups, optimizer.state
        self._to_owners()

    def __repr__(self) -> str:
        return f"MatrixOptimizer({self._wrapped!r})"

    def __contains__(self, param: torch.Tensor) -> bool:
        """Return whether the optimizer has a parameter."""
        return param in self._pieces

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and choose their owners. Other parameters keep theirs."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        placed: dict[DeviceMesh, list[DTensor]] = {}
        for index, param in enumerate(self.param_groups[-1]["params"]):
            self._pieces[param] = []
            if isinstance(param, DTensor):
                self._check(param, f"parameter {index} of group {number}, of shape {list(param.shape)},")
                placed.setdefault(param.device_mesh, []).append(param)
            else:
                self._pieces[param].append(_Piece(param))
        for mesh, params in placed.items():
            if mesh not in self._groups:
                self._groups[mesh] = OwnerGroup(mesh)
            for piece in _assigned(params, self._groups[mesh], self._batches, self._cost):
                self._pieces[piece.param].append(piece)

    def with_params(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> MatrixOptimizer:
        """Return one for copies of the parameters, which takes the wrapped optimizer away from this one."""
        self._wrapped.param_groups = [
            {**group, "params": [copies[param] for param in group["params"]]} for group in self.param_groups
        ]
        self._wrapped.state = defaultdict(dict, {copies[p]: values for p, values in self._sharded_state().items()})
        batches = [copies[param] for param in self._batches]
        return MatrixOptimizer(self._wrapped, batches=batches, cost=self._cost)

    def _check(self, param: DTensor, which: str) -> None:
        if is_extended(param):
            raise UnsupportedError(
                f"MatrixOptimizer: {which} is a {type(shard_in(param)).__name__}, whose shards are not numbers that "
                "can be put together. Leave it to another optimizer."
            )
        if any(isinstance(each, Partial) for each in param.placements):
            raise UnsupportedError(
                f"MatrixOptimizer: {which} is placed as {param.placements}, and its sum is on no rank. Redistribute it."
            )

    # --- the step ----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have gradients. All ranks call this together."""
        check_hooks(self._wrapped, self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        self.take([(param, shard_in(param.grad)) for param in self._pieces if param.grad is not None])
        self.finish()
        return loss

    def begin(self) -> None:
        """Forget what a backward that failed has sent."""
        self._arrived.clear()

    @torch.no_grad()
    def take(self, arrivals: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Start to send parameters and the local tensors of their gradients to the owners.

        Returns no parameter that has its value now: `finish` updates them, when each rank has its share of the work.
        """
        given = dict(arrivals)
        pieces = [piece for param in given for piece in self._pieces[param]]
        whole = [piece for piece in pieces if piece.group is None]
        self._arrived.append(_Arrived(whole, [p.param for p in whole], [given[p.param] for p in whole]))
        for group, owned, members in _alike(pieces):
            grads = group.collect(owned, [given[piece.param] for piece in members])
            values = group.collect(owned, [shard_in(piece.param).detach() for piece in members])
            self._arrived.append(_Arrived(members, values, grads))
        return []

    @torch.no_grad()
    def finish(self) -> None:
        """Update the parameters that were sent, and write to their shards.

        The parts of the first round travel while the second is computed.
        """
        values, grads = dict[_Piece, torch.Tensor](), dict[_Piece, torch.Tensor]()
        for each in self._arrived:
            mine = [piece for piece in each.pieces if piece.is_mine]
            values.update(zip(mine, each.values.wait() if isinstance(each.values, OwnerTransfer) else each.values))
            grads.update(zip(mine, each.grads.wait() if isinstance(each.grads, OwnerTransfer) else each.grads))
        pieces = [piece for each in self._arrived for piece in each.pieces]
        for piece in pieces:
            self.state[piece.param]  # says that it has a state: see _forget_state
        self._arrived.clear()
        under_way: list[OwnerTransfer] = []
        for members in _rounds(pieces):
            stand_in = self._update([piece for piece in members if piece.is_mine], values, grads)
            for group, owned, sent in _alike(members):
                wholes = [values[piece] for piece in sent if piece.is_mine]
                under_way.append(group.distribute(owned, wholes, [shard_in(piece.param).detach() for piece in sent]))
        for transfer in under_way:
            transfer.wait()
        if pieces:  # what a step changes besides parameters and states, such as a count of steps
            for settings, changed in zip(self.param_groups, stand_in.param_groups):
                settings.update((name, value) for name, value in changed.items() if name != "params")
            own = {"param_groups", "state"}
            vars(self._wrapped).update((name, value) for name, value in vars(stand_in).items() if name not in own)

    def _update(
        self,
        pieces: Sequence[_Piece],
        values: Mapping[_Piece, torch.Tensor],
        grads: Mapping[_Piece, torch.Tensor],
    ) -> Optimizer:
        """Run the wrapped optimizer's step on whole parameters; return the optimizer that ran it."""
        wholes: dict[torch.Tensor, list[torch.Tensor]] = {}
        for piece in pieces:
            if piece.group is not None:
                carry_attributes(piece.param, values[piece])
            values[piece].grad = grads[piece]
            wholes.setdefault(piece.param, []).append(values[piece])
        state = defaultdict[torch.Tensor, Any](dict, {values[piece]: piece.state for piece in pieces})
        groups = [
            {**group, "params": [whole for param in group["params"] for whole in wholes.get(param, ())]}
            for group in self.param_groups
        ]
        stand_in: Optimizer = object.__new__(type(self._wrapped))
        vars(stand_in).update(vars(self._wrapped), param_groups=groups, state=state)
        step = type(self._wrapped).step
        inspect.unwrap(step, stop=lambda function: not hasattr(function, "hooked"))(stand_in)  # hooks ran before
        for piece in pieces:
            piece.state = state[values[piece]]
        return stand_in

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as DTensors. All ranks call this together."""
        self.state = self._sharded_state()
        try:
            return super().state_dict()
        finally:
            self._forget_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as DTensors or whole tensors. All ranks call this together."""
        super().load_state_dict(state_dict)
        self._wrapped.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self.state, self.param_groups = self._wrapped.state, self._wrapped.param_groups
        self._to_owners()

    def _forget_state(self) -> None:
        """Leave an empty state for each parameter that has one: DCP runs a step first if an optimizer has none."""
        self.state = defaultdict(dict, {param: {} for param in self.state})

    @torch.no_grad()
    def _to_owners(self) -> None:
        """Send the state to the owners of its parameters."""
        alike: dict[tuple[DeviceMesh, torch.dtype], list[tuple[_Piece, str, DTensor]]] = {}
        for piece in (piece for param in self.state for piece in self._pieces[param]):
            piece.state = {}
            for name, value in self.state[piece.param].items():
                if isinstance(value, DTensor):
                    alike.setdefault((value.device_mesh, value.dtype), []).append((piece, name, value))
                elif piece.is_mine:
                    rows = (
                        piece.batched and isinstance(value, torch.Tensor) and value.shape[:1] == piece.param.shape[:1]
                    )
                    piece.state[name] = value[piece.owned.rows].clone() if rows and piece.owned is not None else value
        for (mesh, _), members in alike.items():
            owned, shards = [p.like(v) for p, _, v in members], [value._local_tensor for _, _, value in members]
            wholes = self._groups[mesh].collect(owned, shards).wait()
            for (piece, name, _), whole in zip((each for each in members if each[0].is_mine), wholes):
                piece.state[name] = whole
        self._forget_state()

    @torch.no_grad()
    def _sharded_state(self) -> defaultdict[torch.Tensor, Any]:
        """Return what all ranks would have as the state of DTensors."""
        known = [piece for param in self.state for piece in self._pieces[param]]
        found = defaultdict[torch.Tensor, Any](dict, {p.param: p.state for p in known if p.group is None})
        for group in self._groups.values():
            pieces = [piece for piece in known if piece.group is group]
            told: list[Any] = [None] * group.size
            mine = {number: _told(piece.state) for number, piece in enumerate(pieces) if piece.is_mine}
            dist.all_gather_object(told, mine, group.group)
            alike: dict[torch.dtype, list[tuple[_Piece, str, DTensor]]] = {}
            for number, state in sorted(itertools.chain.from_iterable(each.items() for each in told)):
                piece = pieces[number]
                for name, value in state.items():
                    if not isinstance(value, _WholeState):
                        found[piece.param][name] = value
                        continue
                    if name not in found[piece.param]:
                        found[piece.param][name] = _empty_like(piece, name, value)
                    alike.setdefault(value.dtype, []).append((piece, name, found[piece.param][name]))
            for members in alike.values():
                wholes = [piece.state[name] for piece, name, _ in members if piece.is_mine]
                owned, shards = [p.like(v) for p, _, v in members], [value._local_tensor for _, _, value in members]
                group.distribute(owned, wholes, shards).wait()
        return found


def _assigned(
    params: Iterable[DTensor], group: OwnerGroup, batches: Collection[torch.Tensor], cost: Callable[[torch.Size], float]
) -> list[_Piece]:
    """Choose the owners of parameters on one mesh."""
    pieces, costs = [], []
    for param in params:
        shape, rows = tuple(param.shape), param.shape[0] if param.ndim else 1
        length = -(-rows // group.size) if param in batches else rows
        for start in range(0, rows, max(length, 1)):
            owned = Owned(shape, group.sizes, tuple(param.placements), 0, start, min(length, rows - start))
            pieces.append(_Piece(param, group, owned, batched=param in batches))
            costs.append(cost(torch.Size(owned.own_shape)))
    # Matrices of a batch that one rank has whole stay there.
    holders = [piece.owned.holder() if piece.batched and piece.owned is not None else None for piece in pieces]
    for piece, owner in zip(pieces, longest_first(costs, holders, group.loads)):
        assert piece.owned is not None
        piece.owned = replace(piece.owned, owner=owner)
    return pieces


def _rounds(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    """Divide pieces so that each owner updates the same share of its own in each round."""
    by_owner: dict[Any, list[_Piece]] = {}
    for piece in pieces:
        by_owner.setdefault(piece.owner, []).append(piece)
    rounds: list[list[_Piece]] = [[] for _ in range(_ROUNDS)]
    for members in by_owner.values():
        for number, piece in enumerate(members):
            rounds[number * _ROUNDS // len(members)].append(piece)
    return [members for members in rounds if members]


def _alike(pieces: Iterable[_Piece]) -> list[tuple[OwnerGroup, list[Owned], list[_Piece]]]:
    """Return pieces of sharded parameters by group and dtype, which travel together."""
    alike: dict[tuple[OwnerGroup, torch.dtype], list[_Piece]] = {}
    for piece in pieces:
        if piece.group is not None:
            alike.setdefault((piece.group, piece.param.dtype), []).append(piece)
    return [(group, [p.owned for p in each if p.owned is not None], each) for (group, _), each in alike.items()]


class _WholeState(NamedTuple):
    """A tensor of the state, at its owner."""

    shape: torch.Size
    dtype: torch.dtype


def _told(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter's state, and the shapes and dtypes of its tensors."""
    told = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            told[name] = _WholeState(value.shape, value.dtype) if value.ndim else value.cpu()
    return told


def _empty_like(piece: _Piece, name: str, whole: _WholeState) -> DTensor:
    """Return a DTensor with memory for a tensor of a parameter's state, on the parameter's mesh."""
    param, owned, group = piece.param, piece.owned, piece.group
    assert isinstance(param, DTensor)
    assert owned is not None
    assert group is not None
    shape = whole.shape
    if piece.batched:
        if shape[0] != owned.length:
            raise UnsupportedError(
                f"MatrixOptimizer: state {name!r} of a parameter of shape {list(param.shape)} has shape {list(shape)} "
                f"for {owned.length} of its matrices, so it is not divided by matrix. Leave the parameter out of "
                "batches."
            )
        shape = torch.Size((len(param), *shape[1:]))
    placements: Sequence[Placement] = param.placements
    if shape != param.shape:  # such as a factor of Shampoo: by rows, along the axis that shards the parameter
        placements = [Replicate()] * param.device_mesh.ndim
        for axis, _ in cuts_of(param.placements)[-1:]:
            placements[axis] = Shard(0)
    box = boxes_of(tuple(shape), group.sizes, tuple(placements))[group.rank]
    local = torch.empty([length for _, length in box], dtype=whole.dtype, device=param._local_tensor.device)
    return dtensor_of(local, param.device_mesh, placements, shape, torch.empty(shape, device="meta").stride())

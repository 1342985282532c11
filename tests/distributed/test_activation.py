"""Activation checkpointing, the user's and graphshard's, matches FSDP2 bit for bit."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import graphshard
from graphshard.errors import InfeasibleError
from graphshard.ir.program import Program
from tests.distributed.twins import assert_same, fsdp2, grads_of, params_of, twins, world_mesh
from tests.ranks import Ranks

aten = torch.ops.aten


class _Block(nn.Module):
    """Attention and a gated layer with dropout, of odd width, so shards are uneven."""

    def __init__(self, dim: int = 6, hidden: int = 9) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.dropout(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + self.dropout(self.down(F.silu(self.up(x))))


class _Net(nn.Module):
    """Blocks called through `call`: plain, or with a torch checkpoint."""

    def __init__(self, call: str = "plain", depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(_Block() for _ in range(depth))
        self.head = nn.Linear(6, 3)
        self.call = call
        for index, block in enumerate(self.layers):
            if call == "composable":
                composable_checkpoint(block)
            elif call == "wrapper":
                self.layers[index] = checkpoint_wrapper(block)
            elif call == "reentrant wrapper":
                self.layers[index] = checkpoint_wrapper(block, CheckpointImpl.REENTRANT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            if self.call == "non-reentrant":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.call == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.call == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, _every_second_addmm())
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return self.head(x).square()  # not a view: FSDP2 warns about views


def _every_second_addmm() -> Callable[..., bool]:
    """Return a policy with separate state for forward and recomputation, as training code has."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen[context.is_recompute] += op == aten.addmm.default
        return op == aten.addmm.default and seen[context.is_recompute] % 2 == 1

    return policy


CALLS = ["non-reentrant", "reentrant", "composable", "wrapper", "reentrant wrapper", "selective"]


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(pair: tuple[nn.Module, nn.Module], rank: int, steps: int = 3) -> None:
    """Train both with dropout; check that every step has the same bits and the same random numbers."""
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(steps):
        seen = []
        for model, optim in zip(pair, optims):
            torch.manual_seed(step * 7 + rank)
            loss = model(_batch(rank, step)).square().mean()
            loss.backward()
            grads = {name: grad.to_local().clone() for name, grad in grads_of(model).items()}
            optim.step()
            optim.zero_grad()
            seen.append({"loss": loss.detach(), "drawn": torch.get_rng_state(), **grads})
        assert_same(*seen, f"step {step}")
        assert_same(*map(params_of, pair), f"parameters after step {step}")


def _collectives(program: Program) -> Counter[str]:
    """Count launches by phase and kind."""
    return Counter(" ".join(line.split()[:2]) for line in program.communication)


# One launch per unit, as in FSDP2; the root's parameters stay gathered.
COLLECTIVES = {"forward: gather": 4, "backward: gather": 3, "backward: reduce": 4}


def _user(rank: int, world_size: int, call: str, options: dict[str, Any]) -> str:
    pair = twins(_Net(call), world_mesh(), **options)
    _train(pair, rank)
    (program,) = graphshard.programs(pair[0])
    regathered = {None: 3, True: 4, False: 0}[options.get("reshard_after_forward")]
    assert _collectives(program) == +Counter({**COLLECTIVES, "backward: gather": regathered})
    return program.saved_table()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow
def test_user_checkpoints_match_fsdp2(ranks: Ranks, call: str) -> None:
    """Every way to checkpoint, with dropout inside; checkpoints add no collectives."""
    table = ranks(2).run(_user, call, {})[0]
    blocks = "".join(line for line in table.splitlines() if line.startswith("layers."))
    assert blocks.count("bernoulli 2") == 3, table
    assert blocks.count("addmm 1") == 3 * (call == "selective"), table


def _wrapped_root(rank: int, world_size: int) -> None:
    """torch's wrapper hides itself from parameter names and loads state dicts differently."""
    model = checkpoint_wrapper(_Net(depth=2))
    pair = twins(model, world_mesh())
    _train(pair, rank)
    ours, theirs = pair
    assert_same(ours.state_dict(), theirs.state_dict(), "states")
    assert set(ours.state_dict()) == set(_Net(depth=2).state_dict())
    ours.load_state_dict({name: value.full_tensor() * 2 for name, value in ours.state_dict().items()})
    theirs.load_state_dict({name: value * 2 for name, value in theirs.state_dict().items()})
    _train((ours, theirs), rank, steps=1)
    blocks = _Net(depth=2)
    for index, block in enumerate(blocks.layers):
        blocks.layers[index] = graphshard.fully_shard(checkpoint_wrapper(block), backend="eager")
    graphshard.fully_shard(blocks, backend="eager")
    blocks(_batch(rank, 0)).sum().backward()
    assert all(grad is not None for grad in grads_of(blocks).values())


@pytest.mark.slow
def test_compiles_a_checkpoint_wrapper(ranks: Ranks) -> None:
    ranks(2).run(_wrapped_root)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.slow
def test_checkpoints_with_parameters_resharded_or_kept(ranks: Ranks, reshard: bool) -> None:
    """Recomputation reads parameters that are kept, without another gather."""
    ranks(2).run(_user, "non-reentrant", {"reshard_after_forward": reshard})


class _Transposed(nn.Module):
    """A non-contiguous value enters a reentrant region, and a contiguous gradient leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.repeat(1, 1, 9)).transpose(1, 2)
        return self.head(checkpoint(torch.sin, x, use_reentrant=True)).square()


def _reentrant(rank: int, world_size: int) -> None:
    _train(twins(_Transposed(), world_mesh()), rank)


def test_gradients_of_a_reentrant_region_have_the_strides_of_its_inputs(ranks: Ranks) -> None:
    """Eager mode accumulates them in leaves; the rounding of sums depends on the memory order."""
    ranks(2).run(_reentrant)


class _Several(nn.Module):
    """A reentrant region that returns a tensor without gradient next to others, and one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, fixed, inside = checkpoint(self._region, self.stem(x), use_reentrant=True)
        whole = checkpoint(lambda v: {"value": v.cos()}, self.stem(x), use_reentrant=True)["value"]
        scale = 2.0 if fixed.requires_grad else 3.0
        depth = [value.requires_grad for value in (y, inside["value"], whole)]
        assert depth == ([True, False, False] if torch.is_grad_enabled() else [False] * 3)
        return self.head(y * fixed * scale + inside["value"] + whole).square()

    def _region(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return x.sin(), x.detach().cos(), {"value": x * 2}


def _requires_grad(rank: int, world_size: int) -> None:
    _train(twins(_Several(), world_mesh()), rank)


def test_requires_grad_of_results_of_a_reentrant_region(ranks: Ranks) -> None:
    """As for an autograd function: all tensors require gradients, but none in a container."""
    ranks(2).run(_requires_grad)


def _dpo(rank: int, world_size: int, call: str) -> None:
    pair = twins(_Net(call, depth=2), world_mesh())
    for step in range(2):
        seen = []
        for model in pair:
            torch.manual_seed(step)
            chosen, rejected = model(_batch(rank, step)), model(_batch(rank, step + 10))
            loss = -F.logsigmoid(chosen.sum() - rejected.sum())
            loss.backward()
            seen.append(loss.detach())
        assert torch.equal(*seen)
        ours, theirs = ({n: g.to_local() for n, g in grads_of(model).items()} for model in pair)
        # FSDP2 adds the unsharded gradients of both and reduces the sum, in a different order.
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_two_forwards_then_a_joint_loss_with_checkpoints(ranks: Ranks) -> None:
    """DPO: each backward finds its own saved values and random states; gradients accumulate."""
    ranks(2).run(_dpo, "non-reentrant")


def _policy(rank: int, world_size: int, activation: Any, backend: str, steps: int) -> str:
    if isinstance(activation, list):
        activation = [getattr(aten, name).default for name in activation]
    torch.manual_seed(0)
    model = _Net()
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    ours = graphshard.compile(model, world_mesh(), backend=backend, activation=activation)
    _train((ours, twin), rank, steps)
    (program,) = graphshard.programs(ours)
    assert _collectives(program) == Counter(COLLECTIVES)
    return program.saved_table()


@pytest.mark.parametrize("activation", ["full", ["addmm"], 0.5, 0, 1])
@pytest.mark.slow
def test_activation_policies_match_fsdp2(ranks: Ranks, activation: Any) -> None:
    """Recomputed or saved, the bits equal FSDP2 without checkpointing."""
    table = ranks(2).run(_policy, activation, "eager", 3)[0]
    assert ("bernoulli 2" in table) == (activation != 1), table


def _policy_in_inductor(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = _Net("non-reentrant", depth=1)
    twin = fsdp2(copy.deepcopy(model), world_mesh())
    pair = graphshard.compile(model, world_mesh(), activation="full"), twin
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for compiled in pair:
            torch.manual_seed(rank)
            compiled(_batch(rank, 0)).mean().backward()
    assert not [str(warning.message) for warning in caught if "Inductor cannot compile" in str(warning.message)]
    ours, theirs = ({n: g.to_local() for n, g in grads_of(m).items()} for m in pair)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_inductor_recomputes_random_numbers(ranks: Ranks) -> None:
    """The dropout masks equal FSDP2's; no region falls back to eager operators."""
    ranks(2).run(_policy_in_inductor)


class _Wide(nn.Module):
    """Blocks that save much more than their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 65), nn.GELU(), nn.Linear(65, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = x + block(x)
        return x


def _decided(rank: int, world_size: int) -> None:
    """Compile with the smallest possible limit, and with a loose one."""
    torch.manual_seed(0)
    model = _Wide()

    def ours(limit: int) -> nn.Module:
        made = copy.deepcopy(model)
        return graphshard.compile(made, world_mesh(), backend="eager", activation="auto", memory_limit=limit)

    with pytest.raises(InfeasibleError, match=r"no choice of activation=.auto. takes less") as error:
        ours(1)(_batch(rank, 0))
    seen = []
    for limit in (error.value.smallest, 10 * error.value.smallest):
        pair = ours(limit), fsdp2(copy.deepcopy(model), world_mesh())
        _train(pair, rank)
        (program,) = graphshard.programs(pair[0])
        assert program.plan is not None
        assert program.plan.prediction is not None
        assert program.plan.prediction.peak_bytes <= limit
        seen.append(sum(sum(row.recomputed.values()) for row in program.saved))
    assert seen[0] > seen[1]


@pytest.mark.slow
def test_memory_limit_matches_fsdp2(ranks: Ranks) -> None:
    ranks(2).run(_decided)

"""Operations of training loops on a compiled module, with FSDP2's semantics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.passes import Float8AllGather
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.torch_compat.torch_ops import TorchDispatchMode
from tests.distributed.twins import (
    GATHERS,
    CountLaunches,
    assert_same,
    example_llama,
    fsdp2,
    grads_of,
    params_of,
    twins,
    world_mesh,
)
from tests.helpers import Blocks
from tests.passes.contrib.test_float8_all_gather import as_gathered
from tests.ranks import RankError, Ranks

X = torch.linspace(-1, 1, 16).view(2, 8)


def _same_after(pair: tuple[nn.Module, nn.Module], step: Any, when: str) -> None:
    """Run a step on both and compare the results and the gradients."""
    found = []
    for model in pair:
        torch.manual_seed(torch.distributed.get_rank())
        found.append({"result": step(model).detach()})
    assert_same(*found, when)
    assert_same(*map(grads_of, pair), when)


def _types(rank: int, world_size: int) -> None:
    for reshard in (True, None, False):
        model = graphshard.compile(Blocks(2, 8), world_mesh(), reshard_after_forward=reshard, backend="eager")
        loss = model(X)
        assert all(isinstance(p, DTensor) for p in model.parameters()) == (reshard is not False)
        loss.backward()
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())


@pytest.mark.slow
def test_parameters_are_dtensors_unless_kept_gathered(ranks: Ranks) -> None:
    """FSDP2 swaps in plain tensors if parameters stay gathered, which is the root's default."""
    ranks(2).run(_types)


def _misprefetched(rank: int, world_size: int) -> list[str]:
    """Prefetch too late, too early, or gathered parameters; return the order in which gathers of forward start."""
    lists = {"layers.0": ["layers.2"], "layers.1": ["layers.0"], "layers.2": ["layers.1", "layers.0"]}
    planner = PlanByUnit(forward_prefetch=lists, backward_prefetch=lists)
    passes = graphshard.Pipeline().replace("plan", graphshard.passes.MakePlan(planner))
    model = Blocks(3, 8)
    twin = copy.deepcopy(model)
    for module in (*twin.layers, twin):
        fully_shard(module, mesh=world_mesh())
    ours = graphshard.compile(model, world_mesh(), passes=passes, backend="eager")

    def step(model: nn.Module) -> Tensor:
        loss = model(X)
        loss.backward()
        return loss

    _same_after((ours, twin), step, "with lists")
    (program,) = graphshard.programs(ours)
    starts = [event.bucket for event in program.plan.events["forward"] if event.action == "start"]
    return [bucket.removeprefix("gather layers.").removesuffix(" in forward") for bucket in starts]


def test_wrong_prefetch_lists_do_not_hang(ranks: Ranks) -> None:
    """They are followed: the last layer is gathered before the middle one."""
    assert ranks(2).run(_misprefetched) == [["0", "2", "1"]] * 2


class Repeated(nn.Module):
    """Calls the same layers several times, and has no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self) -> Tensor:
        x = self.start
        for _ in range(3):
            for layer in self.layers:
                x = layer(x).tanh()
        return x.square().sum()


def _repeated(rank: int, world_size: int) -> tuple[int, int]:
    pair = twins(Repeated(), world_mesh())

    def step(model: nn.Module) -> Tensor:
        loss = model()
        loss.backward()
        return loss

    _same_after(pair, step, "first step")
    with CountLaunches() as counted:
        pair[0]().backward()
    return counted.of("gather"), counted.of("scatter")


@pytest.mark.slow
def test_layers_called_again_and_no_inputs(ranks: Ranks) -> None:
    """A layer is gathered once in forward, once in backward (the root is kept), and reduced once."""
    assert ranks(2).run(_repeated) == [(5, 3)] * 2


class Views(nn.Module):
    """Changes its input and intermediate values in place; returns views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(3)
        y = self.layers[0](x)
        y.mul_(2)
        return y.view(-1), y[0], x[0]


def _views(rank: int, world_size: int) -> None:
    pair = twins(Views(), world_mesh())

    def step(model: nn.Module) -> Tensor:
        x = X.clone()
        whole, part, given = model(x)
        assert torch.equal(x, 3 * X)
        assert torch.equal(given, x[0])
        (whole.sum() + (part * 3).square().sum()).backward()
        return torch.cat([whole, part, given])

    _same_after(pair, step, "views")


@pytest.mark.slow
def test_views_and_in_place_operators(ranks: Ranks) -> None:
    ranks(2).run(_views)


class Phases(nn.Module):
    """Reads a buffer, then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.register_buffer("phase", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x) * self.phase.cos()
        self.phase.add_(1)
        return y.square().sum()


def _phases(rank: int, world_size: int) -> None:
    pair = twins(Phases(), world_mesh())

    def step(model: nn.Module) -> Tensor:
        loss = model(X)
        loss.backward()
        return loss

    for number in range(2):
        _same_after(pair, step, f"step {number}")
        assert_same(*(dict(model.named_buffers()) for model in pair), f"step {number}")


@pytest.mark.slow
def test_buffers_changed_after_a_read(ranks: Ranks) -> None:
    """Backward recomputes the cosine from the value that forward read."""
    ranks(2).run(_phases)


class Chunked(nn.Module):
    """A head that is called chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x)


def _chunked(rank: int, world_size: int) -> None:
    """Accumulate over the head's chunks, then run the trunk's backward."""
    model = Chunked()
    reference = copy.deepcopy(model)
    ours = graphshard.compile(model, world_mesh(), units=["layers.*", "head"], backend="eager")
    x = torch.randn(4, 8)
    hidden = ours(x)
    leaf = hidden.detach().requires_grad_()
    ours.set_requires_gradient_sync(False)
    for index, chunk in enumerate(leaf.chunk(2)):
        ours.set_requires_gradient_sync(index == 1)
        ours.head(chunk).square().sum().backward()
    hidden.backward(leaf.grad)
    reference.head(reference(x)).square().sum().backward()
    for name, param in reference.named_parameters():
        torch.distributed.all_reduce(param.grad, torch.distributed.ReduceOp.AVG)
        torch.testing.assert_close(ours.get_parameter(name).grad.full_tensor(), param.grad, msg=name)


@pytest.mark.slow
def test_a_head_called_in_chunks(ranks: Ranks) -> None:
    ranks(2).run(_chunked)


def _no_need(rank: int, world_size: int) -> list[int]:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8))
    theirs = copy.deepcopy(model)
    for module in (*theirs, theirs):
        fully_shard(module, mesh=world_mesh())
    ours = graphshard.compile(model, world_mesh(), units=["0", "1"], backend="eager")
    gathers = []
    for compiled in (ours, theirs):
        compiled(torch.tensor([1, 2])).sum().backward()
        loss = compiled(torch.tensor([1, 2])).sum()
        with CountLaunches() as counted:
            loss.backward()
        gathers.append(counted.of("gather"))
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    return gathers


@pytest.mark.slow
def test_backward_gathers_only_what_it_reads(ranks: Ranks) -> None:
    """The linear layer's weight, but not the embedding, which FSDP2 gathers, too."""
    assert ranks(2).run(_no_need) == [[1, 2]] * 2


class Gain(nn.Module):
    """Multiplies by a buffer and then updates it; the factor's gradient is the old value of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("gain", torch.linspace(1, 2, 8))
        self.register_buffer("previous", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.factor()
        self.previous.copy_(self.gain)
        self.gain.mul_(1.5)
        return y.square().sum()

    def factor(self) -> Tensor:
        return self.gain.clone()


class GainAsView(Gain):
    """Saves a view of the buffer for backward, not the buffer."""

    def factor(self) -> Tensor:
        return self.gain.detach().clone()


def _updated(rank: int, world_size: int, kind: type[Gain]) -> None:
    pair = twins(kind(), world_mesh())
    for _ in range(2):
        losses = [model(X + rank) for model in pair]
        for loss in losses:
            loss.backward()
        assert_same({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, "the loss")
        assert_same(*map(grads_of, pair), "gradients")
        assert_same(*(dict(model.named_buffers()) for model in pair), "buffers")


@pytest.mark.parametrize("kind", [Gain, GainAsView])
@pytest.mark.slow
def test_backward_uses_the_buffer_values_of_forward(ranks: Ranks, kind: type[Gain]) -> None:
    ranks(2).run(_updated, kind)


class Experts(nn.Module):
    """Two layers, of which each input uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Chosen(Experts):
    """Computes both and selects one by value."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.where(index > 0, self.layers[1](x), self.layers[0](x)).square().sum()


class Branch(Experts):
    """Selects one by a Python number."""

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x).square().sum()


class Condition(Experts):
    """Selects one by value with `torch.cond`."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.cond(index > 0, self.layers[1].forward, self.layers[0].forward, (x,)).square().sum()


def _chosen(rank: int, world_size: int) -> None:
    """Each rank selects a different layer; both layers are reduced on all ranks, with zeros from the others."""
    model = Chosen()
    plain = copy.deepcopy(model)
    pair = twins(model, world_mesh())
    for step in range(2):
        index = (rank + step) % 2
        for compiled in pair:
            compiled.zero_grad()
            compiled(X, torch.tensor(index)).backward()
        assert_same(*map(grads_of, pair), f"gradients of step {step}")
        plain.zero_grad()
        for layer in range(2):
            (plain(X, torch.tensor(layer)) / 2).backward()  # together the ranks use both
        for name, param in plain.named_parameters():
            torch.testing.assert_close(pair[0].get_parameter(name).grad.full_tensor(), param.grad)
    assert len(graphshard.programs(pair[0])) == 1


@pytest.mark.slow
def test_ranks_that_use_different_layers(ranks: Ranks) -> None:
    ranks(2).run(_chosen)


def _branch(rank: int, world_size: int) -> None:
    """The same branch on all ranks is valid."""
    ours, theirs = twins(Branch(), world_mesh())
    for index in (0, 1):
        for model in (ours, theirs):
            model.zero_grad()
            model(X, index).backward()
        assert_same(grads_of(ours), grads_of(theirs), f"layer {index}")
    graphshard.compile(Branch(), world_mesh(), backend="eager")(X, rank)


@pytest.mark.slow
def test_rejects_ranks_that_branch_to_different_layers(ranks: Ranks) -> None:
    """They would gather different parameters; the error replaces a hang."""
    message = r"made a different program than rank .*\n.*gather layers\.\d\.weight.*\n.*gather layers\.\d\.weight"
    with pytest.raises(RankError, match=message):
        ranks(2).run(_branch)


def _condition(rank: int, world_size: int) -> None:
    """FSDP2 does not support it: each rank would gather only what its branch needs."""
    torch.manual_seed(0)
    plain = Condition()
    model = graphshard.compile(copy.deepcopy(plain), world_mesh(), backend="eager")
    assert torch.equal(model(X, torch.tensor(rank)), plain(X, torch.tensor(rank)))


@pytest.mark.slow
def test_conditional_layers_are_gathered_on_all_ranks(ranks: Ranks) -> None:
    """A branch of torch.cond may select another layer on each rank."""
    ranks(2).run(_condition)


def _compiled_blocks(rank: int, world_size: int) -> None:
    """Call `block.compile()` first, like FSDP2 users: the whole model is captured without the compiled blocks."""
    model, batch = example_llama(layers=1)
    twin = copy.deepcopy(model)
    calls: list[Any] = []
    for layer in model.layers:
        layer.compile(backend=lambda graph, inputs: calls.append(graph) or graph)
    ours = graphshard.compile(model, world_mesh(), backend="eager")
    theirs = fully_shard(twin, mesh=world_mesh())
    for compiled in (ours, theirs):
        torch.manual_seed(rank)
        compiled(**batch()).backward()
    assert_same(grads_of(ours), grads_of(theirs), "gradients")
    assert [program.title for program in graphshard.programs(ours)] == ["Llama-0"]
    assert not calls


@pytest.mark.slow
def test_blocks_compiled_by_the_user(ranks: Ranks) -> None:
    ranks(2).run(_compiled_blocks)


@torch.library.custom_op("graphshard_tests::fragile", mutates_args=())
def fragile(x: Tensor, where: str) -> Tensor:
    if where in FAILING:
        raise torch.OutOfMemoryError(f"out of memory in {where}")
    return x.clone()


@fragile.register_fake
def _(x: Tensor, where: str) -> Tensor:
    return torch.empty_like(x)


def _fragile_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return fragile(grad, "backward"), None


fragile.register_autograd(_fragile_backward)
FAILING: set[str] = set()


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = fragile(x, "forward") if index == 1 else x
        return x.square().sum()


def _after_an_exception(rank: int, world_size: int, where: str, accumulate: bool) -> None:
    ours, theirs = twins(Fragile(), world_mesh())
    x = X + rank
    for _ in range(2):
        ours(x).backward()  # complete steps before and after
        ours.zero_grad()
        ours.set_requires_gradient_sync(not accumulate)
        if accumulate:  # a successful microbatch, whose gradients stay on the rank
            ours(x).backward()
        FAILING.add(where)
        with pytest.raises(torch.OutOfMemoryError, match=where):
            ours(x).backward()
        FAILING.clear()
        ours.zero_grad()
        ours.reset_iter_state()
        ours.set_requires_gradient_sync(True)
    losses = [{"loss": model(x)} for model in (ours, theirs)]
    for loss in losses:
        loss["loss"].backward()
    assert_same(*losses, "the step after")
    assert_same(grads_of(ours), grads_of(theirs), "the step after")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.quick_cases("forward-True", "backward-False")
def test_the_step_after_an_exception_equals_fsdp2(ranks: Ranks, where: str, accumulate: bool) -> None:
    """Out of memory in a region, in forward or backward, on all ranks; FSDP2's steps all succeed."""
    ranks(2).run(_after_an_exception, where, accumulate)


def _soak(rank: int, world_size: int) -> None:
    """Run random numbers of microbatches, random shapes and random evaluations."""
    import gc
    import random

    model, _ = example_llama(layers=1)
    batch = torch.export.Dim("batch", max=64)
    shapes = {"tokens": {0: batch}, "targets": {0: batch}}
    twin = copy.deepcopy(model)
    for layer in twin.layers:
        fully_shard(layer, mesh=world_mesh())
    fully_shard(twin, mesh=world_mesh())
    pair = graphshard.compile(model, world_mesh(), backend="eager", dynamic_shapes=shapes), twin
    optims = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in pair]
    chance = random.Random(0)  # equal on all ranks
    objects = []
    for step in range(500):
        microbatches = chance.choice((1, 1, 1, 2, 3))
        rows = [chance.randint(2, 6) for _ in range(microbatches)]
        evaluate = chance.random() < 0.1
        losses: list[list[Tensor]] = []
        for compiled, optim in zip(pair, optims):
            torch.manual_seed(step * world_size + rank)
            losses.append([])
            for index, size in enumerate(rows):
                compiled.set_requires_gradient_sync(index == microbatches - 1)
                tokens = torch.randint(0, 101, (size, 8))
                loss = compiled(tokens=tokens, targets=tokens)
                loss.backward()
                losses[-1].append(loss.detach())
            optim.step()
            optim.zero_grad()
            if evaluate:
                compiled.eval()
                with torch.no_grad():
                    losses[-1].append(compiled(tokens=tokens, targets=tokens))
                compiled.train()
                for module in compiled.modules():
                    if isinstance(module, torch.distributed.fsdp.FSDPModule):
                        module.reshard()
        assert all(map(torch.equal, *losses)), f"step {step}"
        if step % 100 == 99:
            gc.collect()
            objects.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
    assert_same(*map(params_of, pair), "after 500 steps")
    assert len(graphshard.programs(pair[0])) == 2  # training and evaluation
    assert max(objects[1:]) <= objects[1] + 5, f"tensors alive after every 100 steps: {objects}"


@pytest.mark.slow
def test_500_steps_of_everything(ranks: Ranks) -> None:
    """Bitwise equal to FSDP2, from two programs, and memory does not grow."""
    ranks(2).run(_soak, timeout=900)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def _hooks(rank: int, world_size: int) -> None:
    """The root's hooks run around every call; inner hooks are captured, including their appends to lists."""
    seen: list[str] = []
    model = Hooked()
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.append("after"))
    model.register_full_backward_hook(lambda module, grads, outs: seen.append("backward"))

    def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append("inside")
        return 2 * out

    model.layers[0].register_forward_hook(double)
    model.layers[1].register_full_backward_hook(lambda module, grads, outs: tuple(grad / 2 for grad in grads))
    ours = graphshard.compile(model, world_mesh(), backend="eager")
    x = X.clone().requires_grad_()
    for _ in range(2):
        ours(x).backward()
    assert seen == ["before", "inside", "after", "backward"] * 2
    weights = [p.full_tensor() for p in ours.parameters()]
    y = 2 * nn.functional.linear(X, *weights[:2])
    torch.testing.assert_close(ours(X), nn.functional.linear(y, *weights[2:]).square().sum())


def test_hooks_of_the_root_and_of_inner_modules(ranks: Ranks) -> None:
    ranks(2).run(_hooks)


class _Sent(TorchDispatchMode):
    """Records dtypes and sizes of the inputs of gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in GATHERS:
            self.sent.append((args[1].dtype, args[1].numel()))
        return func(*args, **(kwargs or {}))


def _in_eight_bits(rank: int, world_size: int) -> None:
    """FSDP2 trains on the received weights: each shard is rounded to eight bits with its own scale."""
    model = Blocks(3, 8)
    exact = graphshard.compile(copy.deepcopy(model), world_mesh(), backend="eager")
    rounded = copy.deepcopy(model)
    rounded.load_state_dict({name: as_gathered(weight) for name, weight in model.state_dict().items()})
    theirs = fsdp2(rounded, world_mesh())
    passes = graphshard.Pipeline().insert(Float8AllGather(("layers.*",)), before="plan")
    ours = graphshard.compile(model, world_mesh(), passes=passes, backend="eager")
    ours(X + rank).backward()  # compiles before anything is counted
    ours.zero_grad()
    losses = [{"loss": compiled(X + rank)} for compiled in (theirs, exact)]
    losses[0]["loss"].backward()
    with _Sent() as mode:
        loss = ours(X + rank)
        loss.backward()
    assert mode.sent == [(torch.uint8, 4 * 8 + 4)] * 5  # backward does not need the first layer
    assert_same({"loss": loss}, losses[0], "of the weights that arrive")
    assert_same(grads_of(ours), grads_of(theirs), "of the weights that arrive")
    assert not torch.equal(loss, losses[1]["loss"])


@pytest.mark.slow
def test_gathers_in_eight_bits(ranks: Ranks) -> None:
    ranks(2).run(_in_eight_bits)

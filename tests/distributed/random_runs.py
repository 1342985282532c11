"""Run a random program on the ranks with graphshard and with FSDP2, and report differences."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.export import Dim
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphshard
from graphshard.ir.units import PolicySpec, UnitSpec, find_units, modules_of, precision_of
from tests.distributed.nets import largest_dim
from tests.distributed.random_pieces import KINDS, VOCAB
from tests.distributed.random_programs import Call, Piece, Program, Stack
from tests.distributed.twins import local, world_mesh

# Events in order: a label, and the values at that time by name.
Seen = list[tuple[str, dict[str, Tensor | None]]]

BF16 = torch.bfloat16
POLICIES: dict[str, PolicySpec] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "pure bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16 in fp32 out": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32),
    "no cast": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=False),
    "by unit": {"*": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32), "": MixedPrecisionPolicy()},
}
UNITS: dict[str, list[UnitSpec] | None] = {
    "blocks": None,
    "root": [],
    "some": ["blocks.0"],
    "nested": ["blocks.*", "blocks.*.cell*"],
    "pieces": ["first.cell*", "blocks.*.cell*", "last.cell*"],
    "ends": [("first", "last"), "blocks.*"],
    "joined": [("blocks.0", "blocks.1")],
}
ACTIVATION = {"default": None, "full": "full", "half": 0.5, "nothing": 0.0}


class Cell(nn.Module):
    """A piece with casts to its dtype and a residual."""

    def __init__(self, piece: Piece, width: int) -> None:
        super().__init__()
        self.inner = KINDS[piece.kind](width, piece.size, piece.flag)
        self.residual = piece.residual
        if piece.frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        for param in self.parameters():
            x = x.to(param.dtype)
            break
        y = self.inner(x, tokens)
        return x + y if self.residual else y


class Cells(nn.Module):
    """The pieces of a stack, in sequence."""

    def __init__(self, stack: Stack, width: int) -> None:
        super().__init__()
        for index, piece in enumerate(stack.pieces):
            self.add_module(f"cell{index}", Cell(piece, width))
        self.to(getattr(torch, stack.dtype))

    def forward(self, x: Tensor, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        if context is not None:
            x = x + context.sin().to(x.dtype)
        for cell in self.children():
            x = cell(x, tokens)
        return x


class Net(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.first = Cells(program.first, program.width)
        self.blocks = nn.ModuleList(Cells(stack, program.width) for stack in program.blocks)
        self.last = Cells(program.last, program.width)
        self.head = nn.Linear(program.width, 3)
        self.calls = program.calls
        self.output = program.output
        if program.tied:
            _tie([self.first, self.last] if program.units in ("blocks", "nested", "root", "some", "joined") else [])
            if program.units in ("blocks", "root", "some"):
                for block in self.blocks:
                    _tie([block])

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        context = x = self.first(x, tokens)
        for call in self.calls:
            x = self._call(call, x, tokens, context)
        x = self.last(x, tokens)
        values = self.head(x.to(self.head.weight.dtype))
        if self.output == "loss":
            return values.float().square().mean()
        if self.output == "two":
            return values, context
        return {"values": values, "rest": [x]} if self.output == "dict" else values

    def _call(self, call: Call, x: Tensor, tokens: Tensor, context: Tensor) -> Tensor:
        block = self.blocks[call.block]
        given = (x, tokens, context) if call.join == "context" else (x, tokens)
        if call.checkpoint == "no" or (call.checkpoint == "reentrant" and not x.requires_grad):
            y = block(*given)
        elif call.checkpoint == "selective":
            y = checkpoint(block, *given, use_reentrant=False, context_fn=_selected)
        else:
            y = checkpoint(block, *given, use_reentrant=call.checkpoint == "reentrant")
        if call.join == "add":
            return x + y.to(x.dtype)
        if call.join == "gate":
            return y * x.to(y.dtype).sigmoid()
        return y + context.to(y.dtype) if call.join == "early" else y


def _selected() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.tanh.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _tie(modules: list[nn.Module]) -> None:
    """Tie all matrices of one shape in these modules."""
    known: dict[Any, nn.Parameter] = {}
    for owner in (sub for module in modules for sub in module.modules()):
        for name, param in owner.named_parameters(recurse=False):
            if param.dim() >= 2:
                setattr(owner, name, known.setdefault((param.shape, param.dtype, param.requires_grad), param))


def differences(rank: int, world_size: int, program: Program) -> str:
    """Train with both on every rank; return the first difference and when it appeared, or ""."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, error = _outcome(_theirs, program)
        if error:
            return f"FSDP2 cannot: {error}"
        ours, error = _outcome(_ours, program)
        if error:
            return f"raises {error}"
    close = program.backend != "eager"
    for (when, a), (_, b) in zip(ours, theirs, strict=True):
        if list(a) != list(b):
            return f"{when}: {list(a)} and not {list(b)}"
        differing = [told for name in a if (told := _compare(name, a[name], b[name], close=close))]
        if differing:
            return f"{when}: {', '.join(differing)}"
    return ""


def _outcome(run: Any, program: Program) -> tuple[Seen, str]:
    seen: Seen = []
    try:
        for item in run(program):
            seen.append(item)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return seen, f"{type(error).__name__}: {' '.join(lines)[:2000]}"
    return seen, ""


def _ours(program: Program) -> Iterator[tuple[str, dict[str, Tensor | None]]]:
    model = Net(program)
    units = _units(model, program)
    both = {0: Dim.AUTO, 1: Dim.AUTO}
    compiled = graphshard.compile(
        model,
        world_mesh(),
        backend=program.backend,
        units=units,
        shard_placement_fn=_placement(program),
        reshard_after_forward=program.reshard,
        mp_policy=_policy(model, program),
        activation=ACTIVATION[program.activation] if find_units(model, units) else None,
        dynamic_shapes=(both, both) if program.dynamic else None,
    )
    return _train(compiled, program)


def _theirs(program: Program) -> Iterator[tuple[str, dict[str, Tensor | None]]]:
    model, mesh = Net(program), world_mesh()
    units = find_units(model, _units(model, program))
    precision = precision_of(_policy(model, program), units)
    for unit in (*reversed(units), ""):
        modules = [model.get_submodule(name) for name in modules_of(unit)]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            shard_placement_fn=_placement(program),
            reshard_after_forward=program.reshard,
            mp_policy=precision.of(unit),
        )
    return _train(model, program)


def _units(model: nn.Module, program: Program) -> list[UnitSpec] | None:
    """Return patterns that match any module with parameters."""
    holders = [name for name, sub in model.named_modules() if name and any(True for _ in sub.parameters())]
    specs = UNITS[program.units]
    if specs is None:
        return None
    chosen: list[UnitSpec] = []
    for spec in specs:
        patterns = (spec,) if isinstance(spec, str) else spec
        assert isinstance(patterns, tuple)
        found = tuple(pattern for pattern in patterns if any(_matches(name, pattern) for name in holders))
        if found:
            chosen.append(found[0] if len(found) == 1 else found)
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatch.fnmatch(name, pattern)


def _policy(model: nn.Module, program: Program) -> PolicySpec:
    policy = POLICIES[program.policy]
    if isinstance(policy, dict) and not find_units(model, _units(model, program)):
        return policy[""]
    return policy


def _placement(program: Program) -> Any:
    """Choose the dim to shard; FSDP2 shards dims after the first only evenly."""
    if program.placement == "rows":
        return None

    def place(param: nn.Parameter) -> Shard | None:
        dim = largest_dim(param).dim if program.placement == "largest" else -1
        return Shard(dim) if param.shape[dim] % program.world_size == 0 else None

    return place


def _train(model: Any, program: Program) -> Iterator[tuple[str, dict[str, Tensor | None]]]:
    """Train with AdamW and yield the observable state after each step."""
    rank = dist.get_rank()
    # With rounding differences AdamW would amplify the noise of a zero gradient, such as that of the key bias in
    # attention, to a step of 1e-2.
    eps = 1e-8 if program.backend == "eager" else 1e-3
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    for step in range(program.steps):
        if step == 1:
            yield from _change(model, program)
        for index, sync in enumerate(program.sync):
            last = index == len(program.sync) - 1
            model.set_requires_gradient_sync(sync)
            if program.keep:
                model.set_reshard_after_backward(last)
            seed = 100 * step + 10 * index + rank
            x, tokens = _inputs(program, step + index + rank * program.ragged, seed)
            torch.manual_seed(seed)  # for dropout
            outputs = _outputs(model(x, tokens))
            loss = torch.stack([value.float().square().mean() for value in outputs]).sum()
            loss.backward()
            when = f"step {step}" + (f".{index}" if len(program.sync) > 1 else "")
            yield f"outputs of {when}", {"loss": loss.detach(), **dict(zip("abc", (o.detach() for o in outputs)))}
            yield f"random numbers after {when}", {"state": torch.get_rng_state()}
            yield f"gradient of the input in {when}", {"x": x.grad}
            if any(not isinstance(p, DTensor) for p in model.parameters()) and not program.keep:
                raise RuntimeError("parameters are gathered after backward")
            if last and program.keep:  # FSDP2 keeps fully frozen units gathered
                for unit in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
                    unit.reshard()
            if last or not program.keep:  # FSDP2 shows no gradients while parameters stay gathered
                yield f"gradients of {when}", {n: _copy(p.grad) for n, p in model.named_parameters()}
        if program.clip:
            yield f"norm of step {step}", {"norm": nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()}
        optim.step()
        optim.zero_grad()
        yield f"parameters after step {step}", {n: _copy(p) for n, p in model.named_parameters()}
        yield f"buffers after step {step}", {n: _copy(b) for n, b in model.named_buffers()}


def _change(model: Any, program: Program) -> Iterator[tuple[str, dict[str, Tensor | None]]]:
    if program.changes == "eval":
        model.eval()
    elif program.changes == "attribute":
        for module in model.modules():
            if hasattr(module, "scale"):
                module.scale += 1
    elif program.changes == "freeze":
        for param in model.first.parameters():
            param.requires_grad_(False)
    elif program.changes == "validate":
        model.eval()
        with torch.no_grad():
            outputs = _outputs(model(*_inputs(program, 0, 1)))
        model.reshard()  # FSDP2 keeps the root gathered and would not see the optimizer's writes to its shards
        model.train()
        yield "validation", dict(zip("abc", outputs))


def _inputs(program: Program, which: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = program.sizes[which % len(program.sizes)]
    x = torch.randn(*size, program.width, generator=generator, requires_grad=program.input_grad)
    return x, torch.randint(0, VOCAB, size, generator=generator)


def _outputs(result: Any) -> list[Tensor]:
    if isinstance(result, dict):
        return [result["values"], *result["rest"]]
    return list(result) if isinstance(result, tuple) else [result]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local(tensor).detach().clone()


def _compare(name: str, a: Tensor | None, b: Tensor | None, *, close: bool) -> str:
    """Describe the difference of two tensors; "" if they are equal."""
    if a is None or b is None:
        return "" if a is b else f"{name} is {'None' if a is None else 'there'}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{name} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
    if torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return ""
    error, scale = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    if close and error <= 1e-5 + 1e-4 * scale:
        return ""
    return f"{name} by {error / max(scale, 1e-30):.0e}"

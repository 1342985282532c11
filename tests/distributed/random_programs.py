"""Random training programs as JSON data: a model, and how it is sharded and trained. Failures are shrunk.

    random_program(7)  ->  Program(first=[Piece("linear", size=2)], blocks=[...], calls=[...], policy="bf16", ...)
    smaller(program)   ->  programs with one feature less each: a piece, a call, a non-default option

Features that FSDP2 does not support on a CPU are never generated:

* BatchNorm and LAPACK functions in bfloat16, and gradient divide factors;
* parameters of several dtypes in one unit, and weights tied across units;
* microbatches without communication if a unit is called never or several times: FSDP2 then reduces the accumulated
  gradients separately, after the first call's backward;
* in-place writes to a unit's output that is a view;
* a unit that is called twice, with one call in a reentrant checkpoint (it stays gathered after backward) or with such a
  checkpoint inside (the gradients of each call are reduced separately).

Neither are programs that graphshard rejects: buffers that a checkpointed region reads and writes, or that several
regions write, and branches on grad mode in a reentrant checkpoint, which is off at first and on during recomputation.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cattrs

from tests.distributed.random_pieces import KINDS, REENTRANT

# Pieces that write buffers. Batch norm may be in a checkpointed region if no other call writes its buffers.
WRITING = {"batch_norm", "buffer"}
# Exact in float32 and float64 only.
FULL_PRECISION = {"batch_norm", "linalg", "autocast"}
# Inductor's random numbers, and rounding to few bits, differ from eager mode. A buffer that accumulates values that
# depend on it amplifies rounding differences a thousandfold in three steps.
NOT_CLOSE = {"dropout", "multihead", "encoder", "checkpoint", "function", "reduction", "autocast", "buffer"}


@dataclass(frozen=True)
class Piece:
    """A module of `random_pieces`; `residual` adds the input to the output."""

    kind: str
    size: int = 0
    flag: bool = False
    residual: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Stack:
    """A sequence of pieces whose parameters and arithmetic have one dtype."""

    pieces: tuple[Piece, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Call:
    """A call of a block, and how its result is combined with the input.

    `join` is "no", "add", "gate" (the value enters the block and bypasses it), "early" (adds an earlier value that
    other blocks have used) or "context" (the block also gets that value). `checkpoint` is "no", "plain", "reentrant" or
    "selective".
    """

    block: int
    join: str = "no"
    checkpoint: str = "no"


@dataclass(frozen=True)
class Program:
    """A model, and how it is sharded and trained.

    A step has one microbatch per item of `sync`, which says whether its backward reduces gradients. `sizes` are batch
    and length of the calls, cyclically; with `ragged` they differ between ranks. `changes` happen to the model between
    the first step and the second: "no", "eval", "validate" (a call without gradient), "attribute" or "freeze".
    """

    seed: int = 0
    world_size: int = 2
    width: int = 4
    first: Stack = Stack((Piece("linear"),))
    blocks: tuple[Stack, ...] = ()
    calls: tuple[Call, ...] = ()
    last: Stack = Stack((Piece("linear"),))
    tied: bool = False
    output: str = "value"
    units: str = "blocks"
    placement: str = "rows"
    reshard: bool | None = None
    policy: str = "fp32"
    activation: str = "default"
    sync: tuple[bool, ...] = (True,)
    keep: bool = False
    sizes: tuple[tuple[int, int], ...] = ((3, 5),)
    ragged: bool = False
    dynamic: bool = False
    input_grad: bool = False
    changes: str = "no"
    clip: bool = False
    steps: int = 3
    backend: str = "eager"


def random_program(seed: int, *, backend: str = "eager") -> Program:
    """Generate the program of a seed."""
    draw = random.Random(seed)
    policy = draw.choice(["fp32", "fp32", "bf16", "bf16", "pure bf16", "bf16 in fp32 out", "no cast", "by unit"])
    if backend == "inductor":
        policy = "fp32"
    names = sorted(KINDS.keys() - (FULL_PRECISION if policy != "fp32" else set()))
    if backend == "inductor":
        names = sorted(set(names) - NOT_CLOSE)

    def stack(least: int, most: int, dtype: str = "float32") -> Stack:
        return Stack(
            tuple(
                Piece(
                    draw.choice(names),
                    size=draw.randrange(6),
                    flag=draw.random() < 0.5,
                    residual=draw.random() < 0.3,
                    frozen=draw.random() < 0.1,
                )
                for _ in range(draw.randint(least, most))
            ),
            dtype=dtype,
        )

    units = draw.choice(["blocks", "blocks", "blocks", "root", "some", "nested", "pieces", "ends", "joined"])
    own = units in ("blocks", "nested", "pieces", "ends")  # each block is a unit
    blocks = tuple(
        stack(1, 3, "float64" if own and draw.random() < 0.08 else "float32") for _ in range(draw.randint(0, 3))
    )

    def call() -> Call:
        block, join = draw.randrange(len(blocks)), draw.choice(["no", "no", "add", "gate", "early", "context"])
        checkpoint = draw.choice(["no", "no", "no", "no", "plain", "reentrant", "selective"])
        return Call(block, join, checkpoint)

    calls = tuple(call() for _ in range(len(blocks) and draw.randint(len(blocks), len(blocks) + 1)))
    times = Counter(call.block for call in calls)
    kinds = [{piece.kind for piece in block.pieces} for block in blocks]
    calls = tuple(
        replace(c, checkpoint="no")
        if "buffer" in kinds[c.block] or (times[c.block] > 1 and kinds[c.block] & WRITING)
        else c
        for c in calls
    )
    asking = {i for i, block in enumerate(blocks) if any(piece.kind == "penalty" for piece in block.pieces)}
    calls = tuple(
        replace(c, checkpoint="plain")
        if c.checkpoint == "reentrant" and (times[c.block] > 1 or c.block in asking)
        else c
        for c in calls
    )
    blocks = tuple(b if times[i] <= 1 else _without_reentrant(b) for i, b in enumerate(blocks))
    sync = draw.choice([(True,), (True,), (True, True), (False, True), (False, False, True)])
    dynamic = draw.random() < 0.15
    several = dynamic or draw.random() < 0.1
    return Program(
        seed=seed,
        world_size=draw.choice([2, 2, 3]),
        width=draw.choice([1, 2, 3, 4, 5, 8]),
        first=stack(0, 2),
        blocks=blocks,
        calls=calls,
        last=stack(0, 2),
        tied=draw.random() < 0.3,
        output=draw.choice(["value", "value", "loss", "two", "dict"]),
        units=units,
        placement=draw.choice(["rows", "rows", "largest", "last"]),
        reshard=draw.choice([None, None, True, False]),
        policy=policy,
        activation=draw.choice(["default"] * 4 + ["full", "half", "nothing"]),
        sync=sync if list(times.values()) == [1] * len(blocks) else tuple(True for _ in sync),
        keep=draw.random() < 0.15,
        sizes=tuple((draw.randint(2, 4), draw.randint(2, 6)) for _ in range(draw.randint(2, 3) if several else 1)),
        dynamic=dynamic,
        input_grad=draw.random() < 0.3,
        changes=draw.choice(["no"] * 6 + ["eval", "validate", "attribute", "freeze"]),
        clip=draw.random() < 0.3,
        backend=backend,
    )


def _without_reentrant(stack: Stack) -> Stack:
    return replace(
        stack,
        pieces=tuple(
            replace(p, size=p.size - 1) if p.kind == "checkpoint" and p.size % 3 == REENTRANT else p
            for p in stack.pieces
        ),
    )


def to_json(program: Program) -> str:
    """Serialize to one line that `from_json` reads; defaults are left out."""
    return json.dumps(_plain_data(program), separators=(",", ":"))


def _plain_data(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        return {name: _plain_data(v) for name, (v, default) in fields.items() if v != default}
    return [_plain_data(item) for item in value] if isinstance(value, tuple) else value


def from_json(text: str) -> Program:
    """Parse the output of `to_json`."""
    return cattrs.Converter(forbid_extra_keys=True).structure(json.loads(text), Program)


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one feature less, largest reductions first."""
    for index in range(len(program.calls)):
        yield replace(program, calls=_without(program.calls, index))
    used = {call.block for call in program.calls}
    for index in range(len(program.blocks)):
        if index not in used:
            calls = tuple(replace(c, block=c.block - (c.block > index)) for c in program.calls)
            yield replace(program, blocks=_without(program.blocks, index), calls=calls)
    for name in ("first", "last"):
        for stack in _smaller_stacks(getattr(program, name)):
            yield replace(program, **{name: stack})
    for index, block in enumerate(program.blocks):
        for stack in _smaller_stacks(block):
            yield replace(program, blocks=_with(program.blocks, index, stack))
    for index, call in enumerate(program.calls):
        for name in ("join", "checkpoint"):
            if getattr(call, name) != "no":
                yield replace(program, calls=_with(program.calls, index, replace(call, **{name: "no"})))
    for field in dataclasses.fields(Program):
        kept = field.name in ("seed", "first", "blocks", "calls", "last", "backend", "width")
        if not kept and getattr(program, field.name) != field.default:
            yield replace(program, **{field.name: field.default})
    for index in range(len(program.sync) - 1):
        yield replace(program, sync=_without(program.sync, index))
    for width in (4, 2, 3):
        if program.width > width:
            yield replace(program, width=width)


def _smaller_stacks(stack: Stack) -> Iterator[Stack]:
    for index in range(len(stack.pieces)):
        yield replace(stack, pieces=_without(stack.pieces, index))
    if stack.dtype != "float32":
        yield replace(stack, dtype="float32")
    for index, piece in enumerate(stack.pieces):
        for name in ("residual", "frozen", "flag"):
            if getattr(piece, name):
                yield replace(stack, pieces=_with(stack.pieces, index, replace(piece, **{name: False})))
        for size in range(piece.size):
            yield replace(stack, pieces=_with(stack.pieces, index, replace(piece, size=size)))


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])

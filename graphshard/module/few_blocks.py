"""The program of a model with many equal blocks, made of a capture of a few of them.

    capture 0 1 2 N-2 N-1  ->  passes up to the partition  ->  stamp  ->  other passes, of all blocks

It is the program that capturing all blocks makes (`tests/module/test_few_blocks.py` compares them value by value), or
`Uneven`. What forward reads of a block's attributes is looked up in all of them, so that a change of any is noticed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from graphshard.capture.capture import CaptureSpec, capture
from graphshard.capture.repeats import check_alike, few_blocks, find_repeats
from graphshard.capture.witness import text_at, witness_of
from graphshard.ir.program import Program
from graphshard.ir.repeats import Repeats, Uneven, without_left_out
from graphshard.ir.stamp import stamp
from graphshard.ir.state import MISSING, ModuleState, Place, Read
from graphshard.module.places import look_up
from graphshard.options.options import Options
from graphshard.passes import Partition, Pass
from graphshard.pipeline.observe import Observer
from graphshard.pipeline.pipeline import run_pass

# "1" captures every block.
VARIABLE = "GRAPHSHARD_EVERY_BLOCK"


def repeats_of(module: nn.Module, spec: CaptureSpec, options: Options) -> Repeats | None:
    """Equal blocks of which a few are enough; None if there are none, or if options look at the model as a whole."""
    by_budget = isinstance(options.activation, (int, float)) or options.activation == "auto"
    whole = options.passes is not None or by_budget or options.dynamic_shapes is not None or bool(spec.followed)
    communicates = spec.tensor is not None or spec.experts is not None or bool(spec.extended)
    if whole or communicates or os.environ.get(VARIABLE) == "1":
        return None
    return find_repeats(module)


def program_of_few(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: CaptureSpec,
    repeats: Repeats,
    passes: tuple[Pass, ...],
    observer: Observer,
) -> tuple[Program, tuple[Pass, ...]]:
    """The partitioned program of all blocks, and the passes that are left.

    Raises:
        Uneven: that cannot be told from a few blocks.
        GraphshardError: capture or a pass does not like the model.
    """
    at = next((index for index, step in enumerate(passes) if isinstance(step, Partition)), None)
    if at is None:
        raise Uneven("there is no partition")
    check_alike(spec, repeats)
    start = time.perf_counter()
    with few_blocks(module, repeats) as check_ended:
        program = capture(module, args, kwargs, spec, grad=True)
        check_ended()
    _check(program, repeats)
    rows = program.params
    without_left_out(program, repeats)
    observer.after(program, "capture", 0, time.perf_counter() - start)
    for step in passes[: at + 1]:
        run_pass(step, program, observer)
    observer.show("stamp")
    start = time.perf_counter()
    program = stamp(program, repeats, rows)
    program.state = replace(program.state, reads=(*program.state.reads, *_reads(program.state, module, repeats)))
    observer.after(program, "stamp", len(repeats.missing), time.perf_counter() - start)
    return program, passes[at + 1 :]


def _check(program: Program, repeats: Repeats) -> None:
    """Raise Uneven for what a program has besides its graph that may differ between blocks."""
    state = program.state
    if state.writes or state.conditions or state.numbers or program.checks or program.sizes:
        raise Uneven("forward depends on numbers, or leaves something")
    if any(repeats.place_of(place.module) for places in state.inputs for place in places):
        raise Uneven("blocks have tensors that are no buffers")


def _reads(state: ModuleState, module: nn.Module, repeats: Repeats) -> Iterator[Read]:
    """What blocks that were left out would have read: what the third group did, there."""
    names = {id(part): name for name, part in module.named_modules()}
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for read in state.reads:
        place = repeats.place_of(read.place.module)
        if place is not None and place[0] == 2:
            yield from (_read_at(group, read, module, repeats, names, own) for group in repeats.missing)


def _read_at(
    group: int, read: Read, module: nn.Module, repeats: Repeats, names: dict[int, str], own: Collection[int]
) -> Read:
    place = Place(repeats.name_at(group, read.place.module), read.place.path)
    value = look_up(module, place).now()
    text = "missing" if value is MISSING else text_at(place, value, names, read.free)
    blocks = re.compile(rf"{re.escape(repeats.path)}\.\d+")
    if text != blocks.sub(lambda found: repeats.name_at(group, found[0]), read.text):
        raise Uneven(f"{place} is {text}, and {read.place} is {read.text}")
    if value is MISSING:
        return Read(place, text, (), MISSING)
    return Read(place, text, read.free, value if id(value) in own else witness_of(value, free=read.free))

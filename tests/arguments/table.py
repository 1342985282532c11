"""Every parameter of every public function with malformed values, for `test_functions.py`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.passes import KeepGathered, MakePlan
from tests.arguments import malformed as bad
from tests.arguments.malformed import Failing, Hostile, Made, Row
from tests.helpers import Blocks

INPUTS = (torch.zeros(3, 4),)
MODEL = Made(lambda: Blocks(1))
# An error about inputs may be about the call that they are for.
INPUT = r"\b(example_inputs|args|inputs?|dynamic_shapes)\b"
KEYWORDS = r"\b(example_kwargs|kwargs|inputs?)\b"
# A missing or mismatched file is named by its path.
FILE = r"\bpath\b|cannot be read|cannot (save|load)"
NO_UNITS: tuple[Any, ...] = ("layers.*", 3, [3], ["nope"], [None], Hostile(), [Hostile()])


def entered(block: Callable[..., contextlib.AbstractContextManager[Any]]) -> Callable[..., None]:
    """Return a function that enters a block, where arguments are checked."""

    @functools.wraps(block)
    def enter(*args: Any, **kwargs: Any) -> None:
        with block(*args, **kwargs):
            pass

    return enter


uncompiled, unsharded = entered(graphshard.uncompiled), entered(graphshard.unsharded)


def rows(folder: Path, mesh: DeviceMesh, compiled: nn.Module, file: Path) -> Iterator[Row]:
    """Yield all calls; `file` is an export for this mesh."""
    yield from _compile(mesh, folder)
    yield from _export(folder, compiled)
    yield from _load(mesh, compiled, file)
    yield from _explain()
    yield from _foreign()
    yield from _of_compiled(compiled)
    yield from _compile_step(compiled)
    yield from _checkpoints(folder, compiled)
    yield from _values(folder)


def _compile(mesh: DeviceMesh, folder: Path) -> Iterator[Row]:
    good = {"model": MODEL, "mesh": mesh, "backend": "eager"}
    call = {**good, "example_inputs": INPUTS}
    yield Row(graphshard.compile, "model", bad.NO_MODELS, {"mesh": mesh})
    yield Row(graphshard.compile, "mesh", (*bad.NO_MESHES, (2,), 2), {"model": MODEL})
    for option, values in bad.OPTIONS.items():
        yield Row(graphshard.compile, option, values, {"model": MODEL, "mesh": mesh})
    yield Row(graphshard.compile, "dp_mesh_dims", (3, "fsdp", {}, Hostile()), {"model": MODEL, "mesh": mesh})
    yield Row(graphshard.compile, "dynamic_shapes", bad.DYNAMIC, call, INPUT)
    yield Row(graphshard.compile, "example_inputs", bad.NO_INPUTS, good, INPUT)
    yield Row(graphshard.compile, "example_kwargs", bad.NO_KWARGS, good, KEYWORDS)
    taken = folder / "taken"
    taken.write_text("a file")
    yield Row(graphshard.compile, "dump", (*bad.NO_PATHS, "/dev/null/x", taken, taken / "below"), call)
    yield Row(graphshard.compile, "artifact", bad.NO_PATHS, good)
    yield Row(graphshard.compile, "cache", (3, 1.5, b"x", [], "", "a\0b", Hostile()), good)
    yield Row(graphshard.compile, "cuda_graphs", (None, 3, 1, "yes", b"auto", [], True, "auto", Hostile()), good)
    unit = {"module": MODEL, "mesh": mesh}
    yield Row(graphshard.fully_shard, "module", (*bad.NO_MODELS, [], [None], (nn.Linear(1, 1), 3)), {"mesh": mesh})
    yield Row(graphshard.fully_shard, "mesh", (*bad.NO_MESHES, (2,), 2), {"module": MODEL})
    yield Row(graphshard.fully_shard, "dp_mesh_dims", (3, "fsdp", {}, Hostile()), unit)
    for option, values in bad.OPTIONS.items():
        if option != "units":
            yield Row(graphshard.fully_shard, option, values, unit)


def _export(folder: Path, compiled: nn.Module) -> Iterator[Row]:
    export = graphshard.export
    good = {"model": MODEL, "mesh": (2,), "path": folder / "a.gshard", "example_inputs": INPUTS, "backend": "eager"}
    yield Row(export, "model", (*bad.NO_MODELS, compiled), good)
    yield Row(export, "mesh", (*bad.NO_MESHES, None, [], [[]], [None], [(2,), "x"], (1, 2, 3), (2, 0)), good)
    yield Row(export, "path", (*bad.NO_PATHS, None, "/", "/nodir/x.gshard", "/proc/x.gshard"), good)
    yield Row(export, "mode", (None, 3, [], "train", bad.LONG, Hostile()), good)
    yield Row(export, "calls", (None, 3, [3], "x", Hostile(), [Hostile()], {}), good)
    yield Row(export, "accumulate", bad.NO_BOOLS, good)
    yield Row(export, "device", ("tpu", 3, [], torch.device("cpu"), bad.LONG, Hostile()), good)
    yield Row(export, "capability", ("9.0", 3, [], (7, 5), [(9, 0), 3], {}, Hostile(), (9, 0)), good)
    yield Row(export, "threads", (0, *bad.NO_COUNTS, 10**30), good)
    yield Row(export, "parallelize", bad.NO_FUNCTIONS, good)
    yield Row(export, "compile_regions", ("no", 3, [], Hostile()), good)
    yield Row(export, "example_inputs", bad.NO_INPUTS[:7], good, INPUT)
    yield Row(export, "example_kwargs", bad.NO_KWARGS[:6], {**good, "example_inputs": None}, KEYWORDS)
    yield Row(export, "dynamic_shapes", bad.DYNAMIC[:6], good, INPUT)
    for option, values in bad.OPTIONS.items():
        yield Row(export, option, values[:4], {name: value for name, value in good.items() if name != option})
    yield Row(graphshard.Call, "inputs", (3, "x", INPUTS[0], {1}, Hostile()))
    yield Row(graphshard.Call, "kwargs", (3, [1], {3: 1}, Hostile()))
    yield Row(graphshard.Call, "entry", (3, None, b"x", Hostile()))
    yield Row(graphshard.Call, "training", ("yes", 3, [], Hostile()))
    yield Row(graphshard.Call, "grad", bad.NO_BOOLS)
    no_gradients = (3, [3], "0", [("x",)], [(-1,)], [(True,)], [[[]]], Hostile())
    yield Row(graphshard.Call, "gradients", no_gradients)

    def of_a_call(**given: Any) -> Path:
        return export(Blocks(1), (2,), folder / "b.gshard", calls=[graphshard.Call(INPUTS, **given)], backend="eager")

    yield Row(of_a_call, "gradients", ([(99,)], [(10**30,)]))
    yield Row(of_a_call, "entry", ("nope", bad.LONG, "\0"))


def _load(mesh: DeviceMesh, compiled: nn.Module, file: Path) -> Iterator[Row]:
    good = {"path": file, "model": MODEL, "mesh": mesh}
    yield Row(graphshard.load, "path", (*bad.NO_PATHS, None, "/", "/dev/zero", "nope.gshard"), good, FILE)
    yield Row(graphshard.load, "model", (*bad.NO_MODELS, compiled), good)
    yield Row(graphshard.load, "mesh", bad.NO_MESHES, good)
    for option, values in bad.OPTIONS.items():
        yield Row(graphshard.load, option, values[:4], good)


def _explain() -> Iterator[Row]:
    explain, grid = graphshard.explain, graphshard.explain_grid
    good: dict[str, Any] = {"model": MODEL, "mesh": (2,), "example_inputs": INPUTS}
    yield Row(explain, "model", bad.NO_MODELS, good)
    yield Row(explain, "mesh", (*bad.NO_MESHES, None, [], (1, 2, 3)), good)
    yield Row(explain, "example_inputs", bad.NO_INPUTS, good, INPUT)
    yield Row(explain, "example_kwargs", bad.NO_KWARGS[:8], {**good, "example_inputs": None}, KEYWORDS)
    yield Row(explain, "device", ("tpu", 3, [], torch.device("cuda"), bad.LONG, Hostile()), good)
    yield Row(explain, "network", (None, 3, "nope", [], bad.LONG, Hostile()), good)
    yield Row(explain, "optimizer_states", (*bad.NO_COUNTS, None, 10**30), good)
    yield Row(explain, "every_block", (None, 1, "yes", [], Hostile()), good)
    yield Row(explain, "parallelize", bad.NO_FUNCTIONS, good)
    yield Row(explain, "global_batch", (0, *bad.NO_COUNTS, 3, 10**30), good)
    yield Row(explain, "accumulate", (0, *bad.NO_COUNTS, None, 10**30), good)
    yield Row(explain, "foreach", bad.NO_BOOLS, good)
    no_numbers = (0, -1, True, math.nan, math.inf, "x", [], Hostile())
    yield Row(explain, "clip_norm", no_numbers, good)
    yield Row(explain, "tokens", no_numbers, good)
    yield Row(explain, "price", (*no_numbers, 2.5), good)
    yield Row(explain, "pipeline", (None, 3, "zigzag", [], bad.LONG, Hostile()), good)
    yield Row(explain, "stages_per_rank", (0, *bad.NO_COUNTS, None, 10**30), good)
    yield Row(explain, "measured", (*bad.NO_SECONDS, {"nope": 1.0}), good)
    no_symbols = (3, "batch", ["b"], {"b": "x"}, {3: 0}, {"b": 99}, {"b": -1}, {"b": True}, {"b c": 0}, {"": 0})
    yield Row(explain, "symbols", (*no_symbols, {"b": 10**30}, {"b": 1.0}, Hostile()), good)
    for option, values in bad.OPTIONS.items():
        yield Row(explain, option, values[:6], good)
    several: dict[str, Any] = {"model": MODEL, "meshes": [(2,)], "example_inputs": INPUTS}
    yield Row(grid, "meshes", (None, 3, "8", [3.5], ["x"], [None], {"a": 2}, [], Hostile()), several, r"\bmesh(es)?\b")
    yield Row(grid, "hardware", ("h100", 3, [3], [""], None, [], Hostile()), several)
    yield Row(grid, "network", ("isolated", 3, [3], [""], None, [], Hostile()), several)
    no_settings = (3, [], "x", {3: {}}, {"a": 3}, {"a": {3: 1}}, {"a": None}, {}, Hostile())
    yield Row(grid, "settings", no_settings, several)
    no_degrees = (3, "pp", ["pp"], {3: (2,)}, {"pp": 2}, {"pp": "2"}, {"pp": ()}, {"pp": (0,)}, {"x": (2,)}, Hostile())
    yield Row(grid, "degrees", no_degrees, {**several, "meshes": [2]})
    yield Row(grid, "show", bad.NO_FUNCTIONS, several)
    yield Row(grid, "workers", (0, *bad.NO_COUNTS), several)
    yield Row(grid, "optimizer_states", bad.NO_COUNTS, several)
    no_changes = (3, "batch", [3], ["nope"], [None], {"batch": 1}, [[]], Hostile())
    yield Row(graphshard.what_if, "changes", no_changes, good)
    yield Row(graphshard.what_if, "ranks", (3, "64", None, [0], [True], ["x"], [1.5], [10**30], Hostile()), good)
    yield Row(graphshard.what_if, "show", bad.NO_FUNCTIONS, good)
    yield Row(graphshard.what_if, "tokens", no_numbers, good)


def _foreign() -> Iterator[Row]:
    good: dict[str, Any] = {"gm": torch.fx.symbolic_trace(nn.ReLU())}
    for node in good["gm"].graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    yield Row(graphshard.schedule_graph, "gm", (*bad.NO_MODELS[:4], torch.zeros(2), torch.fx.Graph()))
    no_groups = (3, "dp", ["dp"], {3: 2}, {"dp": "2"}, {"dp": 0}, {"dp": -1}, {"dp": True}, {"dp": 10**30}, Hostile())
    yield Row(graphshard.schedule_graph, "groups", no_groups, good)
    yield Row(graphshard.schedule_graph, "hardware", (*bad.NO_PATHS, None), good)
    yield Row(graphshard.schedule_graph, "network", (None, 3, "nope", [], bad.LONG, Hostile()), good)
    yield Row(graphshard.schedule_graph, "memory_limit", (0, -1, True, 1.5, "8", 10**30, Hostile()), good)
    yield Row(graphshard.schedule_graph, "steps", (*bad.NO_COUNTS, None, 10**30), good)
    yield Row(graphshard.Group, "size", (0, -1, True, 1.5, "8", None, 10**30, Hostile()))
    yield Row(graphshard.Group, "apart", (0, -1, True, 1.5, "8", None, 10**30, Hostile()), {"size": 2})
    yield Row(graphshard.Group, "link", (None, 3, b"a", [], Hostile()), {"size": 2})


def _of_compiled(model: nn.Module) -> Iterator[Row]:
    yield Row(graphshard.programs, "model", bad.UNCOMPILED)
    yield Row(graphshard.register_forward_method, "model", bad.UNCOMPILED, {"method": "forward"})
    no_methods = (None, 3, "", "nope", "a.b", "\0", bad.LONG, b"forward", ["forward"], "training", ".", "layers.")
    yield Row(graphshard.register_forward_method, "method", (*no_methods, Hostile()), {"model": model})
    yield Row(uncompiled, "model", bad.UNCOMPILED)
    yield Row(unsharded, "model", bad.UNCOMPILED)
    yield Row(graphshard.rebuild, "model", bad.UNCOMPILED)
    yield Row(uncompiled, "reshard_after_forward", bad.NO_BOOLS, {"model": model})
    yield Row(graphshard.bisect, "model", bad.UNCOMPILED, {"args": INPUTS})
    yield Row(graphshard.bisect, "args", bad.NO_INPUTS[:7], {"model": model}, INPUT)
    yield Row(graphshard.bisect, "kwargs", bad.NO_KWARGS[:6], {"model": model}, KEYWORDS)
    no_tolerances = ("x", -1, math.nan, True, [], Hostile())
    yield Row(graphshard.bisect, "tolerance", no_tolerances, {"model": model, "args": INPUTS})
    yield Row(graphshard.profiling.measure_regions, "model", bad.UNCOMPILED)
    no_budgets = (None, 0, -1, True, math.nan, math.inf, "x", [], Hostile())
    yield Row(graphshard.profiling.measure_regions, "budget", no_budgets, {"model": model})
    yield Row(graphshard.profiling.measure_regions, "show", bad.NO_FUNCTIONS, {"model": model})
    good = {"model": model, "args": INPUTS}
    yield Row(graphshard.profiling.profile_step, "model", bad.UNCOMPILED, {"args": INPUTS})
    yield Row(graphshard.profiling.profile_step, "args", bad.NO_INPUTS[:7], {"model": model}, INPUT)
    yield Row(graphshard.profiling.profile_step, "kwargs", bad.NO_KWARGS[:6], {"model": model}, KEYWORDS)
    yield Row(graphshard.profiling.profile_step, "loss", bad.NO_FUNCTIONS, good)
    yield Row(graphshard.profiling.profile_step, "warmup", (0, *bad.NO_COUNTS, 1001, 10**30), good)
    yield Row(graphshard.profiling.profile_step, "hardware", bad.OPTIONS["hardware"], good)
    for name in ("requires_gradient_sync", "requires_all_reduce", "reshard_after_forward", "reshard_after_backward"):
        method = getattr(model, f"set_{name}")
        yield Row(method, name, bad.NO_BOOLS)
        yield Row(method, "recurse", bad.NO_BOOLS, {name: True})
        yield Row(method, "units", NO_UNITS, {name: True})
    yield Row(model.set_force_sum_reduction_for_comms, "enable", bad.NO_BOOLS)
    yield Row(model.set_gradient_divide_factor, "factor", (None, 0, -1, math.nan, math.inf, "x", True, Hostile()))
    yield Row(model.unshard, "units", NO_UNITS)
    yield Row(model.unshard, "async_op", bad.NO_BOOLS)
    yield Row(model.reshard, "units", NO_UNITS)
    no_modules = (
        None,
        3,
        "",
        "layers.0",
        b"layers",
        [None],
        ["layers.0"],
        [3],
        [nn.Linear(2, 2)],
        Hostile(),
        [Hostile()],
    )
    yield Row(model.set_modules_to_forward_prefetch, "modules", no_modules)
    yield Row(model.set_modules_to_backward_prefetch, "modules", no_modules)


def _compile_step(model: nn.Module) -> Iterator[Row]:
    step, optimizer = graphshard.compile_step, torch.optim.SGD(model.parameters(), lr=0.1)
    good = {"model": model, "optimizer": optimizer}
    yield Row(step, "model", bad.UNCOMPILED, {"optimizer": optimizer})
    yield Row(step, "optimizer", (None, 3, "adam", torch.optim.SGD, [optimizer], Hostile()), {"model": model})
    yield Row(step, "loss", bad.NO_FUNCTIONS, good)
    yield Row(step, "clip_norm", (0, -1, True, math.nan, math.inf, "x", [1.0], Hostile()), good)
    yield Row(step, "gather_ahead", (None, 0, 1, "yes", [], Hostile()), good)
    yield Row(step, "accumulate", (None, 0, *bad.NO_COUNTS), good)
    yield Row(step, "scaler", (3, "cpu", torch.amp.GradScaler, Hostile()), good)


def _checkpoints(folder: Path, model: nn.Module) -> Iterator[Row]:
    save, save_later, load = (
        graphshard.checkpoint.save_checkpoint,
        graphshard.checkpoint.async_save_checkpoint,
        graphshard.checkpoint.load_checkpoint,
    )
    good = {"path": folder / "checkpoint", "model": model}
    yield Row(graphshard.checkpoint.latest_checkpoint, "directory", (*bad.NO_PATHS, None, "/dev/null"))
    for function in (save, save_later, load):
        yield Row(function, "path", (*bad.NO_PATHS, None, "/", ".", "/dev/null/x", "/dev/zero"), good, FILE)
        yield Row(function, "model", [value for value in bad.UNCOMPILED if not isinstance(value, nn.Module)], good)
        no_optimizers = (3, None, [3], "adam", [None], torch.ones(2), Failing(), Hostile())
        yield Row(function, "optimizers", no_optimizers, good)
        yield Row(function, "group", (3, "x", [0], Hostile()), good)
    for function in (save, save_later):
        for name in ("extra", "per_rank"):
            yield Row(function, name, (object(), print, [object()], {object(): 1}, Hostile()), good)
        yield Row(function, "keep", (0, *bad.NO_COUNTS), good)


def _values(folder: Path) -> Iterator[Row]:
    no_files = (*bad.NO_PATHS, None, "/", "/dev/zero", "nope")
    yield Row(graphshard.profiling.load_profile, "hardware", (None, *bad.OPTIONS["hardware"]))
    yield Row(graphshard.profiling.Profile.from_json, "text", bad.NO_TEXTS, {}, "profile")
    yield Row(graphshard.Plan.from_json, "text", bad.NO_TEXTS, {}, "plan")
    yield Row(graphshard.profiling.load_measured, "path", no_files, {}, FILE)
    yield Row(graphshard.profiling.save_measured, "path", (*bad.NO_PATHS, None, "/", "/dev/null/x"), {"measured": {}})
    yield Row(graphshard.profiling.save_measured, "measured", bad.NO_SECONDS, {"path": folder / "measured.json"})
    default = graphshard.Pipeline()
    no_passes = (None, 3, (3,), "plan", [MakePlan], (MakePlan(), MakePlan()), Hostile(), (Hostile(),))
    yield Row(graphshard.Pipeline, "passes", no_passes, {}, r"\bpasses\b|'plan'")
    no_names = (None, 3, "nope", [], bad.LONG, Hostile())
    yield Row(default.insert, "new", (None, 3, "plan", MakePlan, Hostile()), {"after": "plan"})
    yield Row(default.insert, "after", no_names, {"new": KeepGathered()})
    yield Row(default.insert, "before", no_names, {"new": KeepGathered()})
    yield Row(default.replace, "name", no_names, {"new": MakePlan()})
    yield Row(default.replace, "new", (None, 3, MakePlan, Hostile()), {"name": "plan"})
    yield Row(lambda names: default.disable(names), "names", no_names)
    no_bytes = ("x", -1, math.nan, [], True, Hostile())
    yield Row(graphshard.PlanByUnit, "pack_gathers_below", (None, *no_bytes))
    yield Row(graphshard.PlanByUnit, "pack_reductions_below", no_bytes)
    for name in ("forward_prefetch", "backward_prefetch"):
        yield Row(graphshard.PlanByUnit, name, (None, 3, [1], {"a": 3}, {"a": "b"}, {"a": [3]}, Hostile()))

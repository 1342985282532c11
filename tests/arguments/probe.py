import sys, time, traceback, warnings, json, os, tempfile
from pathlib import Path
import torch, torch.distributed as dist, contextlib
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
import graphshard
from tests.arguments.malformed import *
warnings.simplefilter("error")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
tmp = Path(tempfile.mkdtemp())
X = (torch.zeros(3, 4),)
n = bad = 0
only = sys.argv[1] if len(sys.argv) > 1 else ""
def row(function, parameter, values, named=None, **good):
    named = named or {"example_inputs": "(example_inputs|inputs?)", "example_kwargs": "(example_kwargs|inputs?)", "args":"(args|inputs?)", "kwargs":"(kwargs|inputs?)"}.get(parameter)
    global n, bad
    label = f"{getattr(function, '__qualname__', function)}.{parameter}"
    if only and only not in label: return
    for value in values:
        given = {k: (v() if callable(v) and getattr(v,'__name__','')=='<lambda>' else v) for k, v in good.items()}
        given[parameter] = value
        t = time.time()
        error = error_of(function, **given)
        n += 1
        f = faults(error, named or parameter, value)
        dt = time.time() - t
        if f or dt > 3:
            bad += 1
            try: r = repr(value)[:50]
            except Exception: r = "hostile"
            print(f"{label} = {r} [{dt:.1f}s]: {f}", flush=True)
M = lambda: Blocks(1)
row(graphshard.compile, "model", NO_MODELS, mesh=mesh)
row(graphshard.compile, "mesh", [m for m in NO_MESHES] + [(2,), 2], model=M)
for o, v in OPTIONS.items():
    row(graphshard.compile, o, v, model=M, mesh=mesh)
row(graphshard.compile, "dynamic_shapes", DYNAMIC, model=M, mesh=mesh, example_inputs=X, backend="eager")
row(graphshard.compile, "example_inputs", NO_INPUTS, model=M, mesh=mesh, backend="eager")
row(graphshard.compile, "example_kwargs", NO_KWARGS, model=M, mesh=mesh, backend="eager")
row(graphshard.compile, "dump", [*NO_PATHS, "/dev/null/x", "/etc/passwd"], model=M, mesh=mesh, example_inputs=X, backend="eager")
row(graphshard.compile, "artifact", NO_PATHS, model=M, mesh=mesh)
row(graphshard.programs, "model", UNCOMPILED)
c = graphshard.compile(Blocks(1), mesh, backend="eager", example_inputs=X)
row(graphshard.register_forward_method, "model", UNCOMPILED, method="forward")
row(graphshard.register_forward_method, "method", [None, 3, "", "nope", "a.b", "\0", LONG, b"forward", ["forward"], "training", ".", "layers.", Hostile()], model=c)
E = dict(mesh=(2,), path=str(tmp/"a.gshard"), example_inputs=X, backend="eager", model=M)
row(graphshard.export, "model", [*NO_MODELS, c], **{k:v for k,v in E.items()})
row(graphshard.export, "mesh", [*NO_MESHES, None, [], [[]], [None], [(2,),"x"], (1,2,3), (2, 0)], **E)
row(graphshard.export, "path", [*NO_PATHS, None, "/", "/nodir/x.gshard", "/proc/x.gshard"], **E)
row(graphshard.export, "mode", [None, 3, [], "train", LONG, Hostile()], **E)
row(graphshard.export, "calls", [None, 3, [3], "x", Hostile(), [Hostile()], {}], **E)
row(graphshard.export, "accumulate", NO_BOOLS, **E)
row(graphshard.export, "device", ["tpu", 3, [], torch.device("cpu"), LONG, Hostile()], **E)
row(graphshard.export, "threads", [0, *NO_COUNTS, 10**30], **E)
row(graphshard.export, "compile_regions", ["no", 3, [], Hostile(), True if False else "x"], **E)
row(graphshard.export, "example_inputs", NO_INPUTS, **E)
row(graphshard.export, "example_kwargs", NO_KWARGS, **{**E, "example_inputs": None})
row(graphshard.export, "dynamic_shapes", DYNAMIC, **E)
for field, values in {"inputs": [3, "x", X[0], {1}, Hostile()], "kwargs": [3, [1], {3: 1}, Hostile()], "entry": [3, None, b"x", Hostile()],
   "training": ["yes", 3, [], Hostile()], "grad": NO_BOOLS, "gradients": [3, [3], "0", [("x",)], [(-1,)], [(True,)], [[[]]], Hostile()]}.items():
    row(graphshard.Call, field, values)
row(lambda **k: graphshard.export(Blocks(1), (2,), tmp/"b.gshard", calls=[graphshard.Call(X, **k)], backend="eager"), "gradients", [[(99,)]])
row(lambda **k: graphshard.export(Blocks(1), (2,), tmp/"b.gshard", calls=[graphshard.Call(X, **k)], backend="eager"), "entry", ["nope", LONG, "\0"])
good = graphshard.export(Blocks(1), (2,), tmp/"good.gshard", example_inputs=X, backend="eager")
row(graphshard.load, "path", [*NO_PATHS, None, "/", "/dev/zero", "nope.gshard"], model=M, mesh=mesh)
row(graphshard.load, "model", [*NO_MODELS, c], path=good, mesh=mesh)
row(graphshard.load, "mesh", NO_MESHES, path=good, model=M)
for o, v in OPTIONS.items():
    row(graphshard.load, o, v, path=good, model=M, mesh=mesh)
    row(graphshard.export, o, v, **{k: w for k, w in E.items() if k != o})
row(graphshard.load_profile, "hardware", [None, *OPTIONS["hardware"]])
row(graphshard.Profile.from_json, "text", NO_TEXTS, named="profile")
row(graphshard.Plan.from_json, "text", NO_TEXTS, named="plan")
row(graphshard.bisect, "model", UNCOMPILED, args=X)
row(graphshard.bisect, "args", [v for v in NO_INPUTS], model=c)
row(graphshard.bisect, "kwargs", NO_KWARGS, model=c, args=())
row(graphshard.bisect, "tolerance", ["x", -1, math.nan, True, [], Hostile()], model=c, args=X)
P = dict(model=M, mesh=(2,), example_inputs=X)
row(graphshard.explain, "model", NO_MODELS, **P)
row(graphshard.explain, "mesh", [*NO_MESHES, None, [], (1,2,3)], **P)
row(graphshard.explain, "example_inputs", NO_INPUTS, **P)
row(graphshard.explain, "example_kwargs", NO_KWARGS, **{**P, "example_inputs": None})
row(graphshard.explain, "network", [None, 3, "nope", [], LONG, Hostile()], **P)
row(graphshard.explain, "optimizer_states", [*NO_COUNTS, None], **P)
row(graphshard.explain, "measured", [3, [1], "x", {"k": "x"}, {3: 1.0}, {"k": math.nan}, {"k": -1}, {"nope": 1.0}, {None: None}, Hostile()], **P)
row(graphshard.explain, "symbols", [3, "batch", ["b"], {"b": "x"}, {3: 0}, {"b": 99}, {"b": -1}, {"b": True}, {"b c": 0}, {"": 0}, {"b": 10**30}, {"b": 1.0}, Hostile()], **P)
for o, v in OPTIONS.items():
    row(graphshard.explain, o, v, **P)
row(graphshard.explain, "dynamic_shapes", DYNAMIC, **P)
G = dict(model=M, meshes=[(2,)], example_inputs=X)
row(graphshard.explain_grid, "meshes", [None, 3, "8", [3.5], ["x"], [None], {"a": 2}, [], Hostile()], named="mesh(es)?", **G)
row(graphshard.explain_grid, "hardware", ["h100", 3, [3], [""], None, [], Hostile()], **G)
row(graphshard.explain_grid, "network", ["isolated", 3, [3], [""], None, [], Hostile()], **G)
row(graphshard.explain_grid, "settings", [3, [], "x", {3: {}}, {"a": 3}, {"a": {3: 1}}, {"a": None}, {}, Hostile()], **G)
row(graphshard.explain_grid, "show", NO_FUNCTIONS, **G)
row(graphshard.explain_grid, "optimizer_states", NO_COUNTS, **G)
row(graphshard.latest_checkpoint, "directory", [*NO_PATHS, None])
sgd = lambda m: torch.optim.SGD(m.parameters())
for f in (graphshard.save_checkpoint, graphshard.load_checkpoint):
    row(f, "path", [*NO_PATHS, None, "/", "/dev/null/x", "/dev/zero"], model=c)
    row(f, "model", [m for m in UNCOMPILED if not isinstance(m, nn.Module)], path=tmp/"ck")
    row(f, "optimizers", [3, None, [3], "adam", [None], torch.ones(2), sgd, Hostile()], path=tmp/"ck", model=c)
    row(f, "group", [3, "x", [0], Hostile()], path=tmp/"ck", model=c)
for p in ("extra", "per_rank"):
    row(graphshard.save_checkpoint, p, [object(), print, [object()], {"a": {1}}, {object(): 1}, Hostile()], path=tmp/"ck", model=c)
row(graphshard.load_measured, "path", [*NO_PATHS, None, "/", "/dev/zero", "nope"])
row(graphshard.save_measured, "path", [*NO_PATHS, None, "/", "/dev/null/x"], measured={})
row(graphshard.save_measured, "measured", [None, 3, [1], {"k": "x"}, {3: 1.0}, {"k": math.nan}, {"k": -1}, "x", Hostile()], path=tmp/"m.json")
row(graphshard.measure_regions, "model", UNCOMPILED)
row(graphshard.measure_regions, "budget", [None, 0, -1, True, math.nan, math.inf, "x", [], Hostile()], model=c)
row(graphshard.measure_regions, "show", NO_FUNCTIONS, model=c)
P0 = graphshard.Pipeline()
row(graphshard.Pipeline, "passes", [None, 3, (3,), "plan", [MakePlan], (MakePlan(), MakePlan()), Hostile(), (Hostile(),)])
row(P0.insert, "new", [None, 3, "plan", MakePlan, MakePlan(), Hostile()], after="plan")
row(P0.insert, "after", [None, 3, "nope", [], LONG, Hostile()], new=graphshard.passes.KeepGathered())
row(P0.replace, "name", [None, 3, "nope", [], LONG, Hostile()], new=MakePlan())
row(P0.replace, "new", [None, 3, MakePlan, Hostile()], name="plan")
row(lambda names: P0.disable(names), "names", [None, 3, "nope", [], Hostile()], named="pass")
for f in ("pack_gathers_below", "pack_reductions_below"):
    row(graphshard.PlanByUnit, f, [None, "x", -1, math.nan, [], True, Hostile()])
for m in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward", "set_reshard_after_backward", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor"):
    import inspect
    f = getattr(c, m)
    first, *rest = inspect.signature(f).parameters
    row(f, first, [v for v in NO_BOOLS if "factor" not in m] or [None, 0, -1, math.nan, math.inf, "x", True, Hostile()])
    okv = 2.0 if "factor" in m else True
    row(f, "units", ["layers.*", 3, [3], ["nope"], [None], Hostile(), [Hostile()]], **{first: okv})
    if "recurse" in rest: row(f, "recurse", NO_BOOLS, **{first: okv})
row(c.unshard, "units", ["layers.*", 3, [3], ["nope"], [None], Hostile()])
row(c.unshard, "async_op", NO_BOOLS)
row(c.reshard, "units", ["layers.*", 3, [3], ["nope"], [None], Hostile()])
row(c.set_is_last_backward, "is_last_backward", NO_BOOLS)
print(n, "calls", bad, "bad")

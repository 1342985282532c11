"""The subcommand `graphshard bench`: train a model with graphshard and with FSDP2, in turns on the same ranks.

graphshard bench train.py:make --ranks 2        make() returns the model and a tuple of its inputs

First steps come first, each in new processes with empty caches. Then one process per rank holds all variants, which
take turns step by step, so that the load of a shared machine affects all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from graphshard.api import compile
from graphshard.cli._explain_command import dtype_of, function_at, made_on, of_config, reshard_of, shape_of
from graphshard.debug.show import failure
from graphshard.errors import ArgumentError, visible
from graphshard.ir.units import find_units, modules_of
from graphshard.lower.backends import Backend
from graphshard.module.compile_step import compile_step
from graphshard.module.compiled_module import CompiledModule
from graphshard.predict.profile_step import most_allocated, profile_step
from graphshard.runtime.step_recorder import clock_of
from graphshard.torch_compat.torch_ops import pytree
from graphshard.utils.argument_validation import check_count, path_of, write_given
from graphshard.utils.progress import progress
from graphshard.utils.text import brief, format_bytes, say

Step = Callable[[], torch.Tensor]
BASE = "FSDP2"
# Further variants by their names for --also.
ALSO = {"compile-step": "graphshard, compile_step", "eager": "graphshard, eager", "whole": f"{BASE}, compiled whole"}
_COMPILED = {f"{BASE}, compiled blocks": "blocks", ALSO["whole"]: "whole"}
_USUAL = (BASE, f"{BASE}, compiled blocks", "graphshard")
_MOST_STEPS, _MOST_RANKS, _WARMUP = 10_000, 1024, 2
# Seconds that ranks have to end after one has failed.
_GRACE = 20.0
_HEADINGS = (
    *("", "step ms", "quartiles", f"to {BASE}", "tokens/s", "peak memory", "exposed ms", "first step s"),
    f"losses, compared with {BASE}",
)


def run(args: argparse.Namespace) -> int:
    """Start what measures, on this machine or on this rank of torchrun; rank 0 prints."""
    device = _device(args)
    _check(args, device)
    with _launcher(args, device) as start:
        first: dict[str, Any] = {}
        with progress("graphshard bench", lines=True) as show:
            for name in _names(args) if args.first else ():
                show(f"first step of {name}")
                first[name] = start(name)
        found = start("")
    if os.environ.get("RANK", "0") != "0":
        return 0
    if "error" in found:
        raise ArgumentError(found["error"])
    for name, row in found["rows"].items():
        row |= {"first_step_s": first.get(name, {}).get("seconds")}
        row |= {"error": row["error"] or first.get(name, {}).get("error", "")}
    say(f"{found['title']}\n", table(found["rows"]))
    if args.json is not None:
        write_given("--json", args.json, json.dumps(found, indent=1) + "\n")
    return int(any(row["error"] for row in found["rows"].values()))


def _device(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _names(args: argparse.Namespace) -> list[str]:
    return [*_USUAL, *(ALSO[name] for name in args.also)]


def _check(args: argparse.Namespace, device: str) -> None:
    """Raise ArgumentError for arguments that would fail on the ranks."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch.cuda.is_available() is False here.")
    if (args.factory is None) == (args.hf is None):
        raise ArgumentError("give what makes the model, as module:factory or file.py:factory, or --hf config.json")
    check_count("--steps", args.steps, least=2, most=_MOST_STEPS)
    check_count("--inputs", args.inputs, most=_MOST_RANKS)
    _options(args)
    if args.batch is not None:
        shape_of(args.batch)
    elif args.hf is not None:
        raise ArgumentError("--hf needs --batch, the shape of the tokens of one rank, such as 1,4096")
    if args.json is not None and path_of("--json", args.json, "a file to write").is_dir():
        raise ArgumentError(f"--json must be a file to write, got the directory {brief(args.json)}")
    if args.ranks is not None:
        check_count("--ranks", args.ranks, most=_MOST_RANKS)
        if device == "cuda" and "RANK" not in os.environ and args.ranks > torch.cuda.device_count():
            raise ArgumentError(f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs, one for each rank")
    if args.factory is not None:
        function_at("factory", args.factory)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that graphshard and FSDP2 share, without units."""
    policy = MixedPrecisionPolicy(dtype_of(args.param_dtype), dtype_of(args.reduce_dtype))
    return {"mp_policy": policy, "reshard_after_forward": reshard_of(args.reshard)}


# --- processes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _launcher(args: argparse.Namespace, device: str) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Yield a function that measures in new processes, with empty caches, and returns the numbers.

    It takes a variant, for its first step, or "" for the steps of all. Ranks of torchrun agree on a port and a folder.
    """
    launched = "RANK" in os.environ
    if launched:
        dist.init_process_group("gloo")
        ranks, mine, local = dist.get_world_size(), [dist.get_rank()], os.environ.get("LOCAL_RANK", "0")
    else:
        ranks = args.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
        mine, local = list(range(ranks)), "0"

    def start(variant: str) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            agreed = [free.getsockname()[1], f"{tempfile.gettempdir()}/graphshard-bench-{time.time_ns():x}"]
        if launched:
            dist.broadcast_object_list(agreed)
        port, folder = agreed
        Path(folder).mkdir(exist_ok=True)
        common = {
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "MASTER_PORT": str(port),
            "TMPDIR": folder,  # precompiled headers are here, regardless of TORCHINDUCTOR_CACHE_DIR
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "GRAPHSHARD_CACHE": f"{folder}/graphshard",
        }
        if not launched:
            threads = str(max((os.cpu_count() or 1) // ranks, 1))
            common |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
        of_rank = {r: {} if launched else {"RANK": str(r), "LOCAL_RANK": str(r)} for r in mine}
        command = ["-m", "graphshard.cli._bench_command", variant, *args.words]
        try:
            found = run_ranks(command, {rank: {**os.environ, **common, **own} for rank, own in of_rank.items()})
            if launched:
                dist.barrier()
        finally:
            if local == "0":
                shutil.rmtree(folder, ignore_errors=True)
        return min(found, key=_cause)

    try:
        yield start
    finally:
        if launched:
            dist.destroy_process_group()


def _cause(found: Mapping[str, Any]) -> tuple[bool, int]:
    """Return a key that is least for the rank that failed first, which the others waited for.

    It has ended by itself, or says why; a rank that waits is killed.
    """
    ended = re.fullmatch(r"rank \d+ ended with exit status (-?)\d+", found.get("error", ""))
    return "error" not in found, 1 if ended is None else 2 if ended[1] else 0


def run_ranks(command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Run Python with arguments as each rank; return what each prints as JSON in its last line, or its error.

    The output of errors is rank 0's.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in environments]
        processes = [
            subprocess.Popen(
                [sys.executable, *command], env=env, stdout=file, stderr=subprocess.DEVNULL if rank else None
            )
            for file, (rank, env) in zip(files, environments.items())
        ]
        try:
            end = float("inf")
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < end:
                if any(codes):
                    end = min(end, time.monotonic() + _GRACE)
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = []
        for rank, process, file in zip(environments, processes, files):
            file.seek(0)
            last = (file.read().splitlines() or [""])[-1]
            ended = {"error": f"rank {rank} ended with exit status {process.returncode}"}
            found.append(json.loads(last) if last.startswith("{") else ended)
        return found


def _rank(variant: str, args: argparse.Namespace) -> None:
    """Measure as one rank, and print the numbers as JSON."""
    device = _device(args)
    try:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        with progress("graphshard bench", lines=True) as show:
            mesh = init_device_mesh(device, (dist.get_world_size(),))
            if variant:
                found: dict[str, Any] = {"seconds": _Trainee(args, variant, mesh).first}
            else:
                found = _steps(args, _names(args), mesh, show)
    except Exception as error:
        if not isinstance(error, ArgumentError):
            traceback.print_exc()
        found = {"error": str(error) if isinstance(error, ArgumentError) else failure(error)}
    print(f"\n{json.dumps(found)}", flush=True)
    if "error" in found:
        os._exit(1)  # other ranks may be in a collective that this one has left
    dist.destroy_process_group()


# --- one rank ----------------------------------------------------------------------------------------------------


def with_fsdp2(
    model: nn.Module, mesh: DeviceMesh, compiled: str = "", compiler: str = "inductor", units: Any = None, **given: Any
) -> nn.Module:
    """Shard a model with FSDP2 by graphshard's units; `compiled` is "", "blocks" or "whole"."""
    for unit in sorted(find_units(model, units), key=lambda name: -name.count(".")):  # the innermost first
        modules = [model.get_submodule(name) for name in modules_of(unit)]
        for module in modules if compiled == "blocks" else ():
            module.compile(backend=compiler)
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **given)
    fully_shard(model, mesh=mesh, **given)
    if compiled == "whole":
        model.compile(backend=compiler)
    return model


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """Return a function that trains one step and returns the loss, without waiting for the device."""

    def step(*batch: Any) -> torch.Tensor:
        loss = _loss(model(*batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _loss(output: Any) -> torch.Tensor:
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ArgumentError(f"the model returned {brief(output)}: let forward return the loss, or an object with .loss")
    return loss.reshape(())


class _Trainee:
    """A model that a variant trains, after its first step.

    Attributes:
        first: seconds from the model to the end of the first step.
    """

    def __init__(self, args: argparse.Namespace, name: str, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        random.seed(0)
        device, units = mesh.device_type, args.units
        if args.hf is None:
            self.model, inputs = made_on(device, args.factory)
        else:
            self.model, inputs = of_config(device, args.hf), None
        if (inputs is None) == (args.batch is None):
            given = "returns its inputs; leave --batch out" if args.batch else "returns no inputs; give --batch"
            raise ArgumentError(f"{args.factory} {given}")
        self.batch = tuple(inputs) if inputs is not None else _tokens(self.model, args, device)
        self.model.to(device)
        self._device, self._clock = device, clock_of(torch.device(device))
        dist.barrier()
        self._clock.finish()
        began = time.perf_counter()
        if name.startswith(BASE):
            with_fsdp2(self.model, mesh, compiled=_COMPILED.get(name, ""), units=units, **_options(args))
        else:
            backend: Backend = "eager" if name == ALSO["eager"] else args.backend
            compile(self.model, mesh, backend=backend, units=units, **_options(args))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        step: Callable[..., torch.Tensor]
        if name == ALSO["compile-step"]:
            step = compile_step(self.model, self.optimizer, lambda model, *batch: _loss(model(*batch)))
        else:
            step = stepper(self.model, self.optimizer)
        self.step: Step = lambda: step(*self.batch)
        self.losses = [self.step()]
        self._clock.finish()
        self.first = _slowest([time.perf_counter() - began], device)[0]

    def measured(self, resident: int) -> dict[str, float | None]:
        """Measure memory and exposed communication in further steps; `resident` are bytes on CUDA between steps."""
        if self._device == "cuda":
            self._clock.finish()
            before = torch.cuda.memory_stats()["active_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self._clock.finish()
            peak = resident + torch.cuda.memory_stats()["active_bytes.all.peak"] - before
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                self.step()
                self._clock.finish()
            return {"peak_bytes": peak, "exposed_s": exposed_seconds(profile.events())}
        states = pytree.tree_leaves([list(state.values()) for state in self.optimizer.state.values()])
        held = [*self.model.parameters(), *self.model.buffers(), *self.batch, *states]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
        peak = sum(tensor.nbytes for tensor in local if isinstance(tensor, torch.Tensor)) + most_allocated(self.step)
        exposed = None
        if isinstance(self.model, CompiledModule):
            exposed = profile_step(self.model, self.batch, loss=_loss, warmup=1).exposed.measured.median
        return {"peak_bytes": peak, "exposed_s": exposed}


def _tokens(model: nn.Module, args: argparse.Namespace, device: str) -> tuple[torch.Tensor, ...]:
    """Return random indices that all embeddings have, different ones on each rank."""
    most = min((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = shape_of(args.batch)
    return tuple(torch.randint(most, shape, generator=generator).to(device) for _ in range(args.inputs))


def exposed_seconds(events: Iterable[Any]) -> float:
    """Return the seconds in which kernels of NCCL run on the device and no others, by a profiler's events."""
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.name.startswith("nccl:")]
    spans = [(e.time_range.start, e.time_range.end, e.name.startswith("nccl")) for e in kernels]
    covered = [0.0, 0.0]
    for index, chosen in enumerate((spans, [span for span in spans if not span[2]])):
        until = -float("inf")
        for start, end, _ in sorted(chosen):
            covered[index] += max(end - max(start, until), 0.0)
            until = max(until, end)
    return (covered[0] - covered[1]) * 1e-6


def _slowest(values: Sequence[float], device: str) -> list[float]:
    """Return the largest value of all ranks, for each."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return list(found.tolist())


def alternate(
    steps: Mapping[str, Callable[[int], object]], rounds: int, device: str, together: int = 1
) -> dict[str, list[tuple[float, float]]]:
    """Let variants take turns; return the seconds of steps of the slowest rank, and their processor time.

    Args:
        steps: by variant; a step is given the number of the round.
        rounds: in each, all variants have a turn.
        together: steps of a turn. If there are several, one more runs before them, so that the host is ahead.
    """
    clock, found = clock_of(torch.device(device)), {name: list[tuple[float, float]]() for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            if together > 1:
                step(number)
            began, used = clock.stamp(), time.process_time()
            for _ in range(together):
                step(number)
            ended = clock.stamp()
            clock.finish()
            taken = [clock.seconds(began, ended) / together, (time.process_time() - used) / together]
            seconds, processor = _slowest(taken, device)
            found[name].append((seconds, processor))
    return found


def _steps(
    args: argparse.Namespace, names: Sequence[str], mesh: DeviceMesh, show: Callable[[str], None]
) -> dict[str, Any]:
    """Prepare all variants, let them take turns, and return their rows; a variant that fails has an error."""
    device, ready, resident = mesh.device_type, dict[str, _Trainee](), dict[str, int]()
    rows: dict[str, dict[str, Any]] = {name: {"error": ""} for name in names}
    on_cuda = device == "cuda"
    for name in names:
        show(f"make {name}, and train {1 + _WARMUP} steps")
        gc.collect()
        before, error = torch.cuda.memory_stats()["active_bytes.all.current"] if on_cuda else 0, ""
        try:
            trainee = _Trainee(args, name, mesh)
            trainee.losses += [trainee.step() for _ in range(_WARMUP)]
        except ArgumentError:
            raise
        except Exception as failed:
            traceback.print_exc()
            error = failure(failed)
        if _slowest([float(bool(error))], device)[0]:
            rows[name]["error"] = error or "failed on another rank"
            continue
        gc.collect()
        resident[name] = torch.cuda.memory_stats()["active_bytes.all.current"] - before if on_cuda else 0
        ready[name] = trainee

    def trained(trainee: _Trainee, number: int) -> None:
        torch.manual_seed(number)  # the same dropout for all
        trainee.losses.append(trainee.step())

    show(f"{args.steps} steps of each, in turns")
    turns = {name: lambda number, each=trainee: trained(each, number) for name, trainee in ready.items()}
    times = alternate(turns, -(-args.steps // 3) if on_cuda else args.steps, device, 3 if on_cuda else 1)
    base = ready.get(BASE)
    for name, trainee in ready.items():
        show(f"memory and exposed communication of {name}")
        seconds = [each for each, _ in times[name]]
        tokens = next(leaf for leaf in pytree.tree_leaves(trainee.batch) if isinstance(leaf, torch.Tensor))
        count = (tokens.shape[0] if tokens.is_floating_point() else tokens.numel()) * mesh.size()
        ratios = [] if base is None else [a / b for a, (b, _) in zip(seconds, times[BASE])]
        rows[name] |= {
            "step_s": median(seconds),
            "step_times_s": seconds,
            "to_base": median(ratios) if ratios else None,
            "tokens_per_s": count / median(seconds),
            "losses_differ_by": None if base is None else _difference(trainee, base, device),
            **trainee.measured(resident[name]),
        }
    title = f"{args.factory or args.hf} on {mesh.size()} ranks, {device}, torch {torch.__version__}"
    return {"title": title, "ranks": mesh.size(), "device": device, "torch": str(torch.__version__), "rows": rows}


def _difference(trainee: _Trainee, base: _Trainee, device: str) -> float:
    """Return the largest relative difference of losses on any rank; 0.0 are equal bits."""
    ours, theirs = torch.stack(trainee.losses).double(), torch.stack(base.losses).double()
    unlike = ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
    largest = ((ours - theirs).abs() / theirs.abs()).nan_to_num(nan=float("inf"))[unlike]
    return _slowest([float(largest.max()) if largest.numel() else 0.0], device)[0]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return rows by variant as a Markdown table."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|--|" + "--:|" * (len(_HEADINGS) - 2) + "--|"]
    for name, row in rows.items():

        def number(key: str, scale: float, digits: int, row: Mapping[str, Any] = row) -> str:
            return "" if row.get(key) is None else f"{row[key] * scale:,.{digits}f}"

        times = sorted(row.get("step_times_s", ()))
        quartiles = f"{times[len(times) // 4] * 1e3:.1f} to {times[-1 - len(times) // 4] * 1e3:.1f}" if times else ""
        differ = row.get("losses_differ_by")
        losses = "" if differ is None else "equal bits" if differ == 0 else f"differ by {differ:.1e} at most"
        cells = [name, number("step_s", 1e3, 1), quartiles, number("to_base", 1, 2), number("tokens_per_s", 1, 0)]
        peak = format_bytes(row["peak_bytes"]) if "peak_bytes" in row else ""
        cells += [peak, number("exposed_s", 1e3, 1), number("first_step_s", 1, 1)]
        cells.append(f"**failed**: {visible(row['error'], lines=False)}" if row["error"] else losses)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    from graphshard.cli.main import _parser

    _rank(sys.argv[1], _parser().parse_args(sys.argv[2:]))

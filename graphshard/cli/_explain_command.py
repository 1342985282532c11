"""The subcommand `graphshard explain`: predict steps of a model that a factory makes.

graphshard explain examples.llama:Llama ...      module:factory; the factory is called without arguments, on meta
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.export import Dim

from graphshard.cost.profile import load_profile
from graphshard.debug.show import failure, import_module
from graphshard.errors import ArgumentError
from graphshard.ir.mesh import MeshLike
from graphshard.options.options import Activation, Options
from graphshard.predict.answers import WhatIf
from graphshard.predict.explain import explain_grid
from graphshard.predict.explanation import Explanation
from graphshard.predict.profile_step import load_measured
from graphshard.predict.search import Grid
from graphshard.predict.study import Study
from graphshard.predict.training_config import Training
from graphshard.predict.what_if import RANKS, Case, answer, check_about
from graphshard.torch_compat.torch_ops import OpOverload
from graphshard.utils.argument_validation import check_count, path_of, write_given
from graphshard.utils.text import brief, say

# Limits of inputs made here, and of a number's digits.
_MOST_INPUTS, _MOST_ELEMENTS, _MOST_DIGITS = 1000, 1 << 31, 18


def predict(args: argparse.Namespace, show: Callable[[str], None]) -> Explanation | Grid | WhatIf:
    """Return the prediction, answers about it, or the table of several; `show` receives progress."""
    meshes = [_mesh(text) for text in args.mesh]
    shapes = [shape_of(text) for text in args.batch]
    profiles = [load_profile(name) for name in args.hardware]
    check_count("--inputs", args.inputs, most=_MOST_INPUTS)
    for option, count in (("--best", args.best), ("--workers", args.workers)):
        if count is not None:
            check_count(option, count, most=_MOST_INPUTS)
    activations = {text or "": _activation(text) for text in args.activation or [None]}
    degrees = dict(map(_degrees, args.degrees))
    several = (meshes, profiles, args.network, shapes, activations, args.pipeline)
    single = not degrees and all(len(each) <= 1 for each in several)
    about = None if args.what_if is None else check_about(args.what_if or None, "--what-if")
    _check_combination(args, single=single, what_if=about is not None)
    training = {name: getattr(args, name) for name in Training.__dataclass_fields__}
    training["pipeline"] = args.pipeline[0]
    Training(**training)  # report errors before the model is made
    symbols = dict(_symbol(text) for text in args.symbols)
    show("make the model")
    if (args.factory is None) == (args.hf is None):
        raise ArgumentError("give what makes the model, as module:factory or file.py:factory, or --hf config.json")
    model, given = made_on("meta", args.factory) if args.hf is None else (of_config("meta", args.hf), None)
    common: dict[str, Any] = {
        "show": show,
        "every_block": args.every_block,
        "device": args.device,
        "parallelize": None if args.parallelize is None else function_at("--parallelize", args.parallelize),
    }
    if given is None and not shapes:
        raise ArgumentError(f"give --batch, or let {args.factory} return the model and a tuple of its inputs")
    if given is not None and shapes:
        raise ArgumentError(f"{args.factory} returns its inputs; leave --batch out")
    if single:
        inputs = given if given is not None else _inputs(shapes[0], args.inputs)
        (activation,) = activations.values()
        options = Options(**_options(args, inputs), activation=activation)
        study = Study(model, inputs, None, options, Training(**training), symbols, **common)
        if about is not None:
            case = Case((inputs, {}), meshes[0], profiles[0], args.network[0], study.options, study.training)
            return answer(study, case, about, RANKS if args.ranks is None else args.ranks)
        measured = {} if args.measured is None else load_measured(args.measured)
        return study.explain(meshes[0], profiles[0], args.network[0], measured=measured)
    rows: list[Explanation] = []
    left_out: list[str] = []
    for shape in shapes or [()]:
        inputs = given if given is not None else _inputs(shape, args.inputs)
        setting = {**_options(args, inputs), **training, "symbols": symbols}
        settings = {}
        for (saved, activation), pipeline in itertools.product(activations.items(), args.pipeline):
            named = (saved if len(activations) > 1 else "", pipeline if len(args.pipeline) > 1 else "")
            label = ", ".join(filter(None, (",".join(map(str, shape)), *named)))
            settings[label] = {**setting, "activation": activation, "pipeline": pipeline}
        found = explain_grid(
            model,
            [mesh[0] if degrees and isinstance(mesh, list) and len(mesh) == 1 else mesh for mesh in meshes],
            example_inputs=inputs,
            hardware=profiles,
            network=args.network,
            settings=settings,
            degrees=degrees,
            workers=args.workers,
            **common,
        )
        rows += found.rows
        left_out += found.left_out
    return Grid(tuple(rows), tuple(dict.fromkeys(left_out)))


def _check_combination(args: argparse.Namespace, *, single: bool, what_if: bool) -> None:
    """Raise ArgumentError for options that need one prediction, or contradict each other."""
    if not single and any(value is not None for value in (args.html, args.trace, args.measured)):
        raise ArgumentError("--html, --trace and --measured need one mesh, machine, network, batch and activation")
    if what_if and not single:
        raise ArgumentError(
            "--what-if needs one mesh, machine, network, batch and activation: it changes one at a time"
        )
    if what_if and (args.symbols or args.measured is not None):
        raise ArgumentError("--symbols and --measured are of one program, and --what-if makes several. Leave them out.")
    if args.ranks is not None and not what_if:
        raise ArgumentError("--ranks are those that --what-if scales to. Give --what-if, or several of --mesh.")


def output(args: argparse.Namespace, found: Explanation | Grid | WhatIf) -> int:
    """Print a prediction, and write the requested files."""
    say(found.ranking(args.best) if isinstance(found, Grid) and args.best is not None else found)
    if args.json is not None:
        write_given("--json", args.json, found.to_json() + "\n")
    if not isinstance(found, Grid):
        if args.html is not None:
            found.save_html(args.html)
        if args.trace is not None:
            (found if isinstance(found, Explanation) else found.base).save_trace(args.trace)
    return 0


def _options(args: argparse.Namespace, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the options of `explain` that flags choose, for calls with such inputs."""
    return {
        "mp_policy": MixedPrecisionPolicy(dtype_of(args.param_dtype), dtype_of(args.reduce_dtype)),
        "offload_policy": CPUOffloadPolicy() if args.offload else None,
        "reshard_after_forward": reshard_of(args.reshard),
        "units": args.units,
        "reduce": args.reduce,
        "backend": args.backend,
        "memory_limit": args.memory_limit,
        "dynamic_shapes": tuple(dict.fromkeys(args.dynamic, Dim.AUTO) for _ in inputs) if args.dynamic else None,
    }


def of_config(device: str, path: str) -> nn.Module:
    """Return a causal language model of a Hugging Face config file, on a device; nothing is downloaded."""
    file = path_of("--hf", path, "a config.json of a model of Hugging Face")
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ArgumentError(f"--hf: there is no file {brief(str(file))}. Give the config.json of a model.")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ArgumentError("--hf needs transformers, which is not installed: pip install transformers") from None
    try:
        config = AutoConfig.from_pretrained(file)
        config.use_cache = False
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        return type(type(model).__name__, (_WithLoss,), {})(model)
    except Exception as error:  # of the library, for whatever the file holds
        raise ArgumentError(f"--hf: {file} makes no causal language model: {failure(error)}") from error


class _WithLoss(nn.Module):
    """A causal language model that is called with its tokens alone and returns their loss, as training does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def made_on(device: str, path: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Return the model that a factory makes on a device, and its inputs if it returns them."""
    factory = function_at("factory", path)
    try:
        with torch.device(device):
            made = factory()
    except Exception as error:
        raise ArgumentError(f"{path}() failed on the {device} device with {type(error).__name__}: {error}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (inputs is None or isinstance(inputs, (tuple, list))):
        raise ArgumentError(
            f"{path}() must return an nn.Module, or one and a tuple of inputs, got {type(made).__name__}"
        )
    return model, None if inputs is None else tuple(inputs)


def function_at(option: str, path: str) -> Callable[..., Any]:
    """Import the function that an option names as file.py:name or module:name."""
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise ArgumentError(f"{option} must be module:name or file.py:name, got {brief(path)}")
    module = _run_file(option, where) if where.endswith(".py") else import_module(where, option)
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError(f"{path}: {where} has no function or class {name}")
    found: Callable[..., Any] = function
    return found


def _run_file(option: str, where: str) -> object:
    file = path_of(option, where, "a file with a function")
    before = sys.modules.get(file.stem)
    if before is not None and getattr(before, "__file__", None) == str(file):
        return before
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ArgumentError(f"{option}: there is no file {brief(where)}. Give file.py:name, or module:name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code may raise anything
        if sys.modules[file.stem] is module:
            del sys.modules[file.stem]
        raise ArgumentError(f"{option}: {where} cannot be imported: {failure(error)}") from error
    return module


def _inputs(shape: tuple[int, ...], count: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=torch.long) for _ in range(count))


def _whole(text: str) -> int | None:
    """Parse digits; None if the text is something else, or too long."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _sizes(option: str, texts: list[str], whole: str, example: str) -> list[int]:
    sizes = [size for size in map(_whole, texts) if size]
    if len(sizes) < len(texts):
        raise ArgumentError(f"{option} must have positive sizes such as {example}, got {brief(whole)}")
    return sizes


def _mesh(text: str) -> MeshLike:
    """Parse "8", "shard=8" or several axes with commas; axes without names stay without."""
    parts = [part.rpartition("=") for part in text.split(",")]
    sizes = _sizes("--mesh", [size for _, _, size in parts], text, "8")
    if "=" not in text:
        return sizes
    names = [name for name, _, _ in parts]
    if not all(names) or len(set(names)) < len(names):
        raise ArgumentError(f"--mesh must name each axis, with a name of its own, or none, got {brief(text)}")
    return dict(zip(names, sizes))


def shape_of(text: str) -> tuple[int, ...]:
    shape = tuple(_sizes("--batch", text.split(","), text, "1,4096"))
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ArgumentError(f"--batch must have at most {_MOST_ELEMENTS} elements, got {brief(text)}")
    return shape


def _degrees(text: str) -> tuple[str, list[int]]:
    name, _, listed = text.partition("=")
    sizes = [size for size in map(_whole, listed.split(",")) if size]
    if not name or len(sizes) <= listed.count(","):
        raise ArgumentError(f"--degrees must be axes and their sizes such as pp=1,2,4 tp=1,8, got {brief(text)}")
    return name, sizes


def _symbol(text: str) -> tuple[str, int]:
    name, _, dim = text.partition("=")
    if not name.isidentifier() or _whole(dim) is None:
        raise ArgumentError(f"--symbols must be names and dims of the inputs such as batch=0 seq=1, got {brief(text)}")
    return name, int(dim)


def reshard_of(text: str) -> bool | int | None:
    words = {"default": None, "always": True, "never": False}
    if text not in words and _whole(text) is None:
        raise ArgumentError(f"--reshard must be default, always, never or a number of ranks, got {brief(text)}")
    return words.get(text, _whole(text))


def _activation(text: str | None) -> Activation | None:
    """Parse "none", "full", "auto", a number, or names of operators with commas between them."""
    words: dict[str | None, Activation | None] = {None: None, "none": None, "full": "full", "auto": "auto"}
    if text is None or text in words:
        return words[text]
    if text.replace(".", "", 1).isdecimal():
        return float(text)
    return tuple(map(_operator, text.split(",")))


def _operator(name: str) -> OpOverload:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise ArgumentError(
            "--activation must be full, auto, a share from 0 to 1 or operators such as aten.mm.default, got "
            f"{brief(name)}"
        )
    return found


def dtype_of(name: str | None) -> torch.dtype | None:
    dtype = getattr(torch, name, None) if name else None
    if name and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"--param-dtype or --reduce-dtype: torch has no dtype {brief(name)}; bfloat16 is one")
    return dtype

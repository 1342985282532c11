"""Context manager that runs a compiled model eagerly with unsharded parameters, without autograd.

    with graphshard.uncompiled(model):
        tokens = model.generate(prompt, max_new_tokens=100)     caches, any length, code that no program takes

Modules have the classes and forwards that they had before `compile`, and hold their full parameters. What FSDP2's hooks
do where values enter and leave a unit is done, so results have its bits.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import UnsupportedError
from graphshard.ir.operators import copied_to
from graphshard.ir.subclasses import is_extended, shard_in
from graphshard.ir.submodule_entry_points import OF_UNITS, EntryPoint, install_entries
from graphshard.ir.units import Precision, modules_of
from graphshard.module._call_checks import check_materialized
from graphshard.module._fsdp_module import strip_module
from graphshard.module.compiled_module import compiled_module
from graphshard.module.runner import Runner
from graphshard.runtime.shards import ParamRef
from graphshard.runtime.shown_parameters import WholeParameter
from graphshard.runtime.unsharded import Shown, start_gathering
from graphshard.torch_compat.torch_ops import cast_tensors, pytree
from graphshard.utils.argument_validation import check_bool

# Models in a block of `uncompiled`.
_OPEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def uncompiled(model: nn.Module, *, reshard_after_forward: bool = False) -> Iterator[None]:
    """Make a compiled model the module that it was made of, with full parameters and without gradients.

    For `generate()` with caches, libraries that want plain parameters, `save_pretrained` and plain copies
    (`copy.deepcopy`). All ranks enter it together. It is a decorator, too:
    `model.generate = graphshard.uncompiled(model)(model.generate)`.

    Args:
        model: a compiled module.
        reshard_after_forward: False gathers all parameters at once, and ranks may run what they like. True gathers
            the root's, and a unit's for each of its calls, as FSDP2 does: all ranks must run the same units, in the
            same order.

    Raises:
        ArgumentError: the module was not compiled.
        UnsupportedError: a parameter has `fsdp_pre_all_gather`; or, in the block, a module is called with gradients
            enabled, or a parameter was written to.
    """
    check_bool("reshard_after_forward", reshard_after_forward)
    if isinstance(model, nn.Module) and model in _OPEN:
        yield
        return
    model = compiled_module(model)
    runner = model._graphshard
    spec = runner.tracer.spec
    for ref in runner.tracer.params:
        if is_extended(ref.checked()) and not ref.row.ignored:
            raise UnsupportedError(
                f"uncompiled: the parameter {ref.row.name} decides itself what is gathered of it "
                "(fsdp_pre_all_gather), which programs alone do. Call the compiled model instead."
            )
    check_materialized(model, runner.tracer.params, spec.device, runner.tracer.storage.device)
    full = _FullParameters(runner)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        runner.unsharded.shown.hide()
        stack.enter_context(_as_written(model, runner))
        stack.callback(full.hide)
        full.show([ref for ref in runner.tracer.params if not (reshard_after_forward and ref.row.unit)])
        for unit in spec.units if reshard_after_forward else ():
            modules = [model.get_submodule(path) for path in modules_of(unit)]
            stack.enter_context(full.during(unit, modules))
        begin = functools.partial(_begin, spec.device)
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        stack.enter_context(_casting(model, spec.units, spec.precision))
        _OPEN.add(model)
        stack.callback(_OPEN.discard, model)
        yield
        full.check_unchanged()


class _FullParameters:
    """Full parameters of a model that are gathered now, in place of their shards."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._shown = runner, Shown(WholeParameter)
        self._rows = {row.name: row for row in runner.tracer.current_spec().params}
        # Gathered ones: where modules hold them, their shards, the full tensor, and its version.
        self._held: dict[str, tuple[ParamRef, nn.Parameter, torch.Tensor, int]] = {}

    def show(self, refs: Sequence[ParamRef]) -> None:
        """Gather parameters, and let modules hold them."""
        runner, spec = self._runner, self._runner.tracer.spec
        refs = [ref for ref in refs if not ref.row.ignored]
        pairs = [(self._rows[ref.row.name], ref.param) for ref in refs if ref.row.num_shards > 1]
        gathered = start_gathering(pairs, spec.mesh, runner.groups, spec.device)
        for ref in refs:
            name = ref.row.name
            if name in gathered:
                full = gathered[name].wait()
                self._held[name] = ref, ref.param, full, full._version
            else:  # writing to it writes to the parameter
                (local,) = copied_to([shard_in(ref.param).detach()], spec.device)
                full = local.to(self._rows[name].compute_dtype)
            self._shown.show(ref, full)

    def hide(self, refs: Sequence[ParamRef] | None = None) -> None:
        """Let modules hold the shards again; by default all of them."""
        names = None if refs is None else [ref.row.name for ref in refs]
        self._shown.hide(names)
        for name in self._held.keys() & (self._held.keys() if names is None else names):
            ref, shard, *_ = self._held.pop(name)
            ref.put(shard)  # the user may have put another there

    @contextlib.contextmanager
    def during(self, unit: str, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Show the parameters of a unit from the first of its modules that runs to the last."""
        refs = [ref for ref in self._runner.tracer.params if ref.row.unit == unit]
        left: set[nn.Module] = set()

        def enter(module: nn.Module, args: Any) -> None:
            if not left and module in modules:  # and not a copy of one
                self.show(refs)
                left.update(modules)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            left.discard(module)
            if not left and module in modules:
                self.check_unchanged()
                self.hide(refs)

        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def check_unchanged(self) -> None:
        """Raise UnsupportedError if a gathered parameter was written to, or replaced, which its shard does not see."""
        for name, (ref, _, full, version) in self._held.items():
            held = [owner._parameters.get(attribute) for owner, attribute in ref.places]
            same = all(param is not None and shard_in(param).data_ptr() == full.data_ptr() for param in held)
            if not same or full._version != version:
                raise UnsupportedError(
                    f"the parameter {name} was written to, or replaced, within graphshard.uncompiled, where modules "
                    "hold copies. Do that outside of the block, to the shards."
                )


@contextlib.contextmanager
def _as_written(model: nn.Module, runner: Runner) -> Iterator[None]:
    """Give modules the user's classes and methods; what is set on them in the block stays."""
    with contextlib.ExitStack() as stack:
        for module in list(model.modules()):
            ours = {
                name: value for name, value in vars(module).items() if type(value) is EntryPoint or name in OF_UNITS
            }
            stack.callback(_put_back, module, ours, type(module))
            strip_module(module)
        runner.is_uncompiled = True
        try:
            yield
        finally:
            runner.is_uncompiled = False
            stack.close()
            install_entries(model, runner.call_entry)  # around forwards that were replaced in the block


def _put_back(module: nn.Module, ours: dict[str, Any], cls: type[nn.Module]) -> None:
    now = dict(module.__dict__)
    for name, value in ours.items():
        if type(value) is EntryPoint and now.get(name, value.replaced) is value.replaced:
            now.pop(name, None)
    module.__dict__.clear()
    module.__dict__.update({**ours, **now})
    object.__setattr__(module, "__class__", cls)


@contextlib.contextmanager
def _casting(model: nn.Module, units: Sequence[str], precision: Precision) -> Iterator[None]:
    """Cast inputs and outputs of the root and of units, as FSDP2's hooks do; the user's on the root run around that."""
    with contextlib.ExitStack() as stack:
        for unit in ("", *units):
            casts = _Casts(precision.of(unit))
            for owner in map(model.get_submodule, modules_of(unit) if unit else [""]):
                enter = owner.register_forward_pre_hook(casts.enter, with_kwargs=True, prepend=bool(unit))
                leave = owner.register_forward_hook(casts.leave, always_call=True, prepend=not unit)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        yield


class _Casts:
    """Hooks of the modules of a unit."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        self._policy = policy

    def __deepcopy__(self, memo: dict[int, Any]) -> _Casts:
        """Return hooks that do nothing, for a copy of the module."""
        return _Casts(MixedPrecisionPolicy())

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._policy.param_dtype is not None and self._policy.cast_forward_inputs:
            return cast_tensors((args, kwargs), self._policy.param_dtype)
        return args, kwargs

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        return output if self._policy.output_dtype is None else cast_tensors(output, self._policy.output_dtype)


def _begin(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Move inputs to the device before the model's forward, as FSDP2 does."""
    if module not in _OPEN:  # a copy
        return None
    if torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters()):
        raise UnsupportedError(
            "a model is called with gradients enabled within graphshard.uncompiled, where none reaches its shards. "
            "Leave the block to train it, or call it under torch.no_grad()."
        )
    given = pytree.tree_leaves((args, kwargs))
    if all(leaf.device == device for leaf in given if isinstance(leaf, torch.Tensor)):
        return None  # lists stay the caller's, to which forward may append
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))

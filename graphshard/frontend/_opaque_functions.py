"""Functions that a trace does not look into: each call of one is a node of the graph (`ir/opaque_calls.py`).

    torch.compiler.disable            is not to be traced
    torch.autograd.Function           whose forward or backward cannot be traced, such as one that launches kernels
    an operator of a library          that has no implementation for fake tensors

So the gathers of other units overlap with compute around such a call, and the module is not split there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import sympy
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graphshard.frontend.unit_boundaries import BOUNDARY
from graphshard.ir.opaque_calls import (
    AUTOCASTS,
    OPAQUE_BACKWARD,
    OPAQUE_FORWARD,
    TENSOR,
    NotAffineError,
    OpaqueCall,
)
from graphshard.ir.sizes import expression
from graphshard.ir.submodule_entry_points import without_entries
from graphshard.ir.tensor_memory import Affine, TensorMeta
from graphshard.torch_compat.dynamo import (
    AutogradFunctionVariable,
    ConstantVariable,
    InstructionTranslatorBase,
    SkipFunctionVariable,
    TorchInGraphFunctionVariable,
    TorchRuntimeError,
    UnspecializedNNModuleVariable,
    Unsupported,
    VariableTracker,
    proxy_args_kwargs,
    wrap_fx_proxy,
)
from graphshard.torch_compat.symbolic_sizes import hint
from graphshard.torch_compat.torch_ops import OpOverload, pytree, replaced

T = TypeVar("T")


class _Traced(torch.autograd.Function):
    """An opaque call with gradients, while a graph is traced."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, size: Any, *given: Tensor) -> Any:
        *values, state = OPAQUE_FORWARD(call.key, list(given), size)
        found, inputs, num_results = call.found, list(given), len(call.found.results)
        visible = values[: num_results + len(found.written)]
        for index, value in zip(found.written, visible[num_results:]):
            inputs[index] = value
        known = {"input": inputs, "result": values[:num_results], "inner": values[len(visible) :]}
        ctx.call, ctx.size = call, size
        ctx.save_for_backward(*(known[source.kind][source.number] for source in call.reads), state)
        constant = [value for value, meta in zip(values, found.results) if not meta.requires_grad]
        ctx.mark_non_differentiable(*constant, *visible[num_results:])
        ctx.set_materialize_grads(False)
        return tuple(visible)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *reads, state = ctx.saved_tensors
        found = ctx.call.found
        made = iter(OPAQUE_BACKWARD(ctx.call.key, state, reads, list(grads[: len(found.results)]), ctx.size))
        return None, None, *(None if meta is None else next(made) for meta in found.grads)


class OpaqueFunction:
    """A function that graphs of Dynamo call, and that no trace looks into."""

    def __init__(self, function: Any, name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self._calls: dict[Any, OpaqueCall] = {}

    def __deepcopy__(self, _: Any) -> OpaqueFunction:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        marked = [TENSOR if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves]
        size = _dynamic_size(tensors)
        try:
            call = self._call_of(marked, structure, tensors, size)
        except NotAffineError:
            size = 0
            call = self._call_of(marked, structure, tensors, size)
        values = iter(_Traced.apply(call, size, *tensors) if call.grad else OPAQUE_FORWARD(call.key, tensors, size))
        leaves, structure = call.found.returned
        returned = pytree.tree_unflatten([next(values) if leaf is TENSOR else leaf for leaf in leaves], structure)
        for index, value in zip(call.found.written, values):
            with torch.no_grad():
                tensors[index].detach().copy_(value)
        return returned

    def _call_of(self, leaves: list[Any], structure: Any, tensors: list[Tensor], size: Any) -> OpaqueCall:
        """Return the call with these arguments; without a dynamic size, sizes become numbers, with a guard."""
        metas = [TensorMeta.of(tensor, functools.partial(_affine, size)) for tensor in tensors]
        casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCASTS]
        modules = self.function if isinstance(self.function, OnModules) else None
        modes = torch.is_grad_enabled(), *casts, modules and modules.modes
        facts = str(structure), tuple(map(repr, leaves)), tuple(metas), modes
        if facts not in self._calls:
            unchanged = contextlib.nullcontext if modules is None else modules.unchanged
            number = hint(size) if isinstance(size, torch.SymInt) else 0
            self._calls[facts] = OpaqueCall(self.function, self.__name__, leaves, structure, metas, number, unchanged)
        return self._calls[facts]


def _constant(leaf: Any) -> Any:
    """Return an argument with a number for a symbol, which a guard says."""
    kinds: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(leaf)](leaf) if type(leaf) in kinds else leaf


def _dynamic_size(tensors: Sequence[Tensor]) -> Any:
    """Return the only dynamic size of the tensors, if one has it as a dimension; 0 if there is none, or several."""
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    symbols = set[Any]().union(*(size.node.expr.free_symbols for size in sizes))
    found = [size for size in sizes if size.node.expr in symbols and size.node.has_hint()]
    return found[0] if len(symbols) == 1 and found else 0


def _affine(size: Any, value: Any) -> Affine:
    """Return a size as a function of the dynamic one."""
    symbol, found = expression(size), expression(value)
    if not isinstance(size, torch.SymInt) or not isinstance(found, sympy.Basic):
        return Affine(0, int(value))
    slope, start = found.coeff(symbol, 1), found.coeff(symbol, 0)
    if not (slope.is_Integer and start.is_Integer) or sympy.expand(found - slope * symbol - start) != 0:
        raise NotAffineError
    return Affine(int(slope), int(start))


@dataclass(frozen=True, eq=False)
class OnModules:
    """A function of modules, whose parameters and buffers it is given as tensors.

    Attributes:
        function: the modules are among its positional arguments.
        modules: by their places.
    """

    function: Any
    modules: Mapping[int, weakref.ref[nn.Module]]

    def __call__(self, tensors: Sequence[Tensor], *others: Any, **kwargs: Any) -> Any:
        args, values = list(others), iter(tensors)
        with contextlib.ExitStack() as stack:
            for place, module in self._modules():
                args.insert(place, module)
                for owner in module.modules():  # a submodule that is called runs as it was written
                    entries = owner.__dict__.keys() - without_entries(owner).keys()
                    stack.callback(owner.__dict__.update, {name: owner.__dict__.pop(name) for name in entries})
                for path, (owner, kind) in _tensors_of(module).items():
                    held, name, value = owner.__dict__[kind], path.rpartition(".")[2], cast(Any, next(values))
                    stack.callback(held.__setitem__, name, held[name])
                    held[name] = value
                    if kind == "_parameters":
                        value._is_param = True  # an nn.Parameter by isinstance
            return self.function(*args, **kwargs)

    def _modules(self) -> Iterator[tuple[int, nn.Module]]:
        for place, ref in sorted(self.modules.items()):
            module = ref()
            assert module is not None, "a program outlives its model"
            yield place, module

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module trains."""
        return tuple(part.training for _, module in self._modules() for part in module.modules())

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the attributes of the modules when the block is over."""
        owners = [(owner, dict(owner.__dict__)) for _, module in self._modules() for owner in module.modules()]
        try:
            yield
        finally:
            for owner, attributes in owners:
                owner.__dict__.clear()
                owner.__dict__.update(attributes)


def _tensors_of(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the modules that hold the parameters and buffers of a module, with the attribute, by full name."""
    return {
        f"{prefix}.{name}" if prefix else name: (owner, kind)
        for kind in ("_parameters", "_buffers")
        for prefix, owner in module.named_modules()
        for name, tensor in owner.__dict__[kind].items()
        if tensor is not None
    }


# --- calls that a trace meets ----------------------------------------------------------------------------------------


@dataclass
class OpaqueFunctions:
    """Functions that traces of a module do not look into, with those that a trace found out it cannot."""

    _known: dict[Any, OpaqueFunction] = field(default_factory=dict)

    def retrace(self, trace: Callable[[], T]) -> T:
        """Return the result of a trace, which starts again when it has found another such function."""
        while True:
            known = len(self._known)
            try:
                return trace()
            except (Unsupported, TorchRuntimeError):
                if len(self._known) == known:
                    raise

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Let a trace call these functions while the block is open."""
        inline, skip = InstructionTranslatorBase.inline_user_function_return, SkipFunctionVariable.call_function
        method, run = AutogradFunctionVariable.call_method, TorchInGraphFunctionVariable.call_function

        def inline_unless_disabled(tx: Any, fn: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
            function = getattr(fn, "fn", None)
            if _is_disabled(function):
                return self._call(function, function, tx, args, kwargs)
            return inline(tx, fn, args, kwargs, *rest, **named)

        def skip_unless_disabled(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if _is_disabled(variable.value):
                return self._call(variable.value, variable.value, tx, args, kwargs)
            return skip(variable, tx, args, kwargs)

        def apply_or_call(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            trace = functools.partial(method, variable, tx, name, args, kwargs)
            own = variable.fn_cls
            return self._attempt(own, own.apply, trace, tx, args, kwargs) if name == "apply" else trace()

        def run_or_call(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            trace = functools.partial(run, variable, tx, args, kwargs)
            own = variable.value
            return trace() if _is_known(own) else self._attempt(own, own, trace, tx, args, kwargs)

        with contextlib.ExitStack() as stack:
            for owner, name, function in (
                (InstructionTranslatorBase, "inline_user_function_return", inline_unless_disabled),
                (SkipFunctionVariable, "call_function", skip_unless_disabled),
                (AutogradFunctionVariable, "call_method", apply_or_call),
                (TorchInGraphFunctionVariable, "call_function", run_or_call),
            ):
                stack.enter_context(replaced(owner, name, function))
            yield

    def _attempt(self, key: Any, function: Any, trace: Callable[[], T], tx: Any, args: Any, kwargs: Any) -> T:
        """Trace a call; if that fails, the next trace does not look into it."""
        if key in self._known:
            return self._call(key, function, tx, args, kwargs)
        try:
            return trace()
        except (Unsupported, TorchRuntimeError):
            self._opaque(key, function)
            raise

    def _call(self, key: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Add a node that calls the function.

        Raises:
            Unsupported: an argument is neither a tensor, nor a constant, nor a module without units.
        """
        args = [arg.realize() for arg in args]
        modules: dict[int, Any] = {
            place: arg
            for place, arg in enumerate(args)
            if isinstance(arg, UnspecializedNNModuleVariable) and not _has_units(cast(nn.Module, arg.value))
        }
        others = [arg for place, arg in enumerate(args) if place not in modules]
        given, named = proxy_args_kwargs(others, kwargs)
        if modules:
            tensors = tuple(
                _attribute(tx, arg, n).as_proxy() for arg in modules.values() for n in _tensors_of(arg.value)
            )
            key = key, *((place, id(arg.value)) for place, arg in modules.items())
            function = OnModules(function, {place: weakref.ref(arg.value) for place, arg in modules.items()})
            given = (tensors, *given)
        return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", self._opaque(key, function), given, named))

    def _opaque(self, key: Any, function: Any) -> OpaqueFunction:
        if key not in self._known:
            named = function.function if isinstance(function, OnModules) else key
            self._known[key] = OpaqueFunction(function, str(getattr(named, "__qualname__", named)))
        return self._known[key]


def _has_units(module: nn.Module) -> bool:
    return any(BOUNDARY in vars(part) for part in module.modules() if part is not module)


def _attribute(tx: Any, variable: Any, path: str) -> Any:
    for name in path.split("."):
        if hasattr(variable, "var_getattr"):
            variable = variable.var_getattr(tx, name).realize()
        else:  # from torch 2.14 on
            read = VariableTracker.build(tx, getattr)
            variable = read.call_function(tx, [variable, ConstantVariable.create(name)], {}).realize()
    return variable


def _is_disabled(function: Any) -> bool:
    """Return whether the user has disabled a function, or a library."""
    return bool(inspect.getattr_static(function, "_torchdynamo_disable", False)) and not _is_known(function)


def _is_known(function: Any) -> bool:
    """Return whether a function is torch's, or graphshard's."""
    if isinstance(function, OpOverload):
        return function.namespace in ("aten", "prims")
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] in ("torch", "graphshard")

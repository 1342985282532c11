"""Find operators whose fake strides differ from the strides of this machine's kernels.

    python -m benchmarks.fake_strides                        torch's own examples of all functions, float32
    python -m benchmarks.fake_strides --dtype bfloat16 log_softmax nn.functional.layer_norm
    python -m benchmarks.fake_strides --torch                with torch's own rules alone

Forward and backward of each example run with several memory layouts of inputs and gradients. Every operator also runs
on fake copies of its arguments. If its results have another shape, dtype or strides, a line is printed. Takes about 20
minutes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from graphshard.ir.kernel_shapes import new_tracing_mode
from graphshard.torch_compat.fake_tensors import FakeTensorMode
from graphshard.torch_compat.torch_ops import TorchDispatchMode, pytree

EXAMPLES = 12


class Differing(TorchDispatchMode):
    """Dispatch mode that also runs operators on fake copies of their arguments.

    Attributes:
        found: the first difference of each operator.
    """

    def __init__(self, new_mode: Callable[[], FakeTensorMode] = new_tracing_mode) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._new_mode = new_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = self._new_mode()
        try:
            fakes = pytree.tree_map_only(
                Tensor, lambda t: mode.from_tensor(t.detach(), static_shapes=True), (args, kwargs)
            )
            with mode:
                traced = func(*fakes[0], **fakes[1])
        except Exception:  # data-dependent sizes, operators that cannot be traced
            return func(*args, **kwargs)
        inputs = [_layout(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        result = func(*args, **kwargs)
        for real, fake in zip(pytree.tree_leaves(result), pytree.tree_leaves(traced), strict=True):
            if isinstance(real, Tensor) and isinstance(fake, Tensor) and _layout(real) != _layout(fake):
                self.found.setdefault(str(func), f"{', '.join(inputs)}: {_layout(real)}, traced as {_layout(fake)}")
        return result


def _layout(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    # Strides of dims of size 1 have no meaning, nor do strides of an empty tensor.
    strides = [s if n != 1 else "-" for n, s in zip(tensor.shape, tensor.stride())] if tensor.numel() else "-"
    return f"{list(tensor.shape)}{strides} {tensor.dtype}"


def _transposed(tensor: Tensor, a: int, b: int) -> Tensor:
    if tensor.layout is not torch.strided or tensor.dim() < 2:
        return tensor
    made = tensor.detach().transpose(a, b).contiguous().transpose(a, b)
    return made.requires_grad_(tensor.requires_grad)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.dim() not in (4, 5):
        return tensor
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.detach().contiguous(memory_format=memory_format).requires_grad_(tensor.requires_grad)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: _transposed(t, -1, -2),
    lambda t: _transposed(t, 0, 1),
    _channels_last,
)


def run(function: Callable[..., Any], args: Any, kwargs: Any, differing: Differing) -> None:
    """Run forward and backward of one call, with every layout of its arguments and of the gradients."""
    for layout in LAYOUTS:
        given = pytree.tree_map_only(Tensor, layout, (args, kwargs))
        inputs = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
        with differing:
            results = pytree.tree_leaves(function(*given[0], **given[1]))
            outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
            for of_grad in LAYOUTS[:2] if outputs and inputs else ():
                grads = [of_grad(torch.ones_like(t, memory_format=torch.contiguous_format)) for t in outputs]
                torch.autograd.grad(outputs, inputs, grads, allow_unused=True, retain_graph=True)


def _examples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    if dtype in op.dtypes:
        for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)):
            if index < EXAMPLES:
                yield sample


def main() -> int:
    """Run the command and return the number of operators that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of functions in torch's tests")
    parser.add_argument("--dtype", default="float32", help="dtype, such as bfloat16")
    parser.add_argument("--torch", action="store_true", help="torch's own rules only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    differing = Differing(FakeTensorMode if options.torch else new_tracing_mode)
    chosen = [op for op in op_db if not options.names or op.name in options.names]
    for op in track(chosen, "functions"):
        before = set(differing.found)
        for sample in _examples(op, getattr(torch, options.dtype)):
            try:
                run(op.op, (sample.input, *sample.args), sample.kwargs, differing)
            except Exception:  # not differentiable in this layout, or twice
                continue
        for name in differing.found.keys() - before:
            print(f"{name}: {differing.found[name]}", flush=True)
    return len(differing.found)


if __name__ == "__main__":
    sys.exit(main() > 0)

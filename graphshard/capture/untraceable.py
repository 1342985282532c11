"""What a forward does that no program can keep; `diagnose.py` makes a message of it."""

from __future__ import annotations

import os
import sysconfig

import torch

from graphshard.ir.errors import CaptureError

_PACKAGES = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep

_ADVICE = {
    "control flow": (
        "The condition depends on the values of a tensor. Use torch.where for a choice per element, or compute the "
        "condition from shapes, from Python values, or from values of inputs and buffers alone."
    ),
    "random": (
        "The condition depends on a random number, which each rank draws for itself: ranks would run different layers, "
        "at which FSDP2's collectives hang. Make its probability 0 (in transformers, layerdrop=0.0), or decide outside "
        "of the call and pass the decision as an argument."
    ),
    "item": (
        "A tensor's value becomes a Python number. Keep it a tensor, or pass the number into the call as an argument."
    ),
    "text": (
        "Forward returns, or leaves on a module, the text of a number that depends on the values of a tensor, which no "
        "program makes. Return the number, or the tensor, and make the text after the call."
    ),
    "shape": (
        "A size that depends on the values of a tensor must be known here. Say what holds of it with torch._check, or "
        "keep the size, for example with torch.where or a mask."
    ),
    "loop": (
        "The number of rounds depends on the values of a tensor. Loop over everything that may be there, such as all "
        "experts: what has no tokens adds nothing."
    ),
    "operator": "This operator takes functions, which graphshard cannot schedule yet. Write it as plain operators.",
    "branch": (
        "torch.cond computes both branches and chooses one, so a branch cannot draw random numbers, write to a tensor "
        "that it has not made, or use one in other than torch's functions. Do this before torch.cond, or after it."
    ),
    "branches": (
        "The branches of torch.cond must return the same: tensors of equal shape, dtype and strides, equal numbers. "
        "Return numbers as tensors, pad to one shape, or call contiguous()."
    ),
    "write": (
        "Forward writes to a parameter. The full parameter exists during the call only, and FSDP2 loses what is "
        "written to it. Write to it between calls, under torch.no_grad(), or hold the value in a buffer."
    ),
    "write foreign": (
        "Forward writes to a tensor that it finds where no program looks, such as one that functools.cache keeps, and "
        "only the capture would. Keep it in a buffer or an attribute of a module, or write to a copy."
    ),
    "write in backward": (
        "A hook, or the backward of a torch.autograd.Function, writes to a buffer or an input, which the compiled "
        "backward would not. Write in forward, after loss.backward(), or in a hook of the compiled module itself."
    ),
    "read in backward": (
        "A hook, or the backward of a torch.autograd.Function, reads what forward sets on a module. Give it to the "
        "hook as a variable of forward, or save it in ctx."
    ),
    "cast again": (
        "Autocast casts a parameter that is a DTensor once for all its uses, which a program cannot yet. Use it once "
        "in the block, cast it yourself, or use param_dtype of mp_policy in the place of autocast."
    ),
    "sharded gradient": (
        "A gradient of a parameter on the whole mesh lies in pieces along data axes, over which it is to be reduced. "
        "Use the parameter with activations that are cut there by their batch, or whole."
    ),
    "distributed draw": (
        "Random numbers are drawn for a DTensor, which on this device sets the generator's state around it; a program "
        "would not. Draw for local tensors: leave nn.Dropout out of the plan, or call to_local() first."
    ),
    "draws anew": (
        "A checkpoint with preserve_rng_state=False draws other random numbers when it runs again in backward, and a "
        "program those of forward. Leave preserve_rng_state out, or draw outside of the checkpoint."
    ),
    "reentrant": (
        "A checkpoint with use_reentrant=True runs this twice: without gradients in forward, with them in backward. A "
        "program has one answer. Use use_reentrant=False, or ask outside of the checkpoint."
    ),
    "saved hooks": (
        "Hooks of saved tensors lie around a region of torch.utils.checkpoint, which eager mode would run again with "
        "what they make of its inputs. Open them inside of the region, or around the layers that are not in it."
    ),
    "foreign": (
        "Forward uses a tensor that requires a gradient and belongs to no module: its gradient would be lost. Make it "
        "a parameter of a module, pass it as an input, or detach it."
    ),
    "backward": (
        "Gradients of parameters are accumulated after the call. In forward, take them with torch.autograd.grad, which "
        "returns them."
    ),
    "kept": (
        "A tensor of this forward is kept outside of the modules after the call. Return it, or assign it to an "
        "attribute of a module."
    ),
    "remembered": (
        "functools.cache, or lru_cache, keeps here what depends on tensors of this call, or on random numbers, and "
        "later calls would be given that. Let the function compute with numbers alone, or take functools.cache away."
    ),
    "sparse": "The gradient of this embedding would be a sparse tensor, which is no shard. Make it with sparse=False.",
    "nested": (
        "Eager mode makes a nested tensor here where all of the mask's padding is at the end, and leaves zeros in the "
        "padding. Make nn.TransformerEncoder with enable_nested_tensor=False."
    ),
    "size of result": (
        "The sizes of this operator's results depend on values in a way that torch cannot trace. Use another operator: "
        "in the place of torch.linalg.lstsq(a, b), torch.linalg.pinv(a) @ b."
    ),
    "result": (
        "What forward returns has a value that no program can make. Return tensors, numbers, strings, and objects or "
        "collections that hold them."
    ),
    "collective": (
        "This collective writes to tensors, or sends without a result, which no program has. Use those of "
        "torch.distributed._functional_collectives, which return tensors, such as all_reduce(x, 'sum', group), or, "
        "where gradients flow back to other ranks, all_gather_tensor_autograd(x, 0, group). Or communicate outside of "
        "the call."
    ),
    "outside": (
        "It is not torch's, so each call would see the value of the capture. Draw with torch's generator (torch.rand, "
        "torch.randint), or pass the value into the call as a tensor."
    ),
    "file": (
        "A program neither reads nor writes files, and does not ask for them: each call would see what the capture "
        "saw. Do that outside of the call, and pass what it finds into it."
    ),
    "seed": (
        "A program draws from torch's generators one number after the other, and neither reads nor sets their state. "
        "Seed outside of the call, or draw there and pass the numbers in as a tensor."
    ),
    "setting": (
        "A program sets neither settings of torch nor environment variables: only the capture would. Set them outside "
        "of the call."
    ),
    "of tensors": (
        "Of an input, parameter or buffer a program knows shape, strides, dtype and values, and leaves nothing else on "
        "it. Ask outside of the call, and pass the answer into it as an argument; keep what is set on a module."
    ),
    "requires_grad": (
        "What requires a gradient is known before a call. Set it outside of the call; forward may set it to True of an "
        "input that it has not used yet, or take x.detach().requires_grad_()."
    ),
    "iterator": (
        "Each call takes the next item of an iterator, and a program would have that of the capture. Keep a list and a "
        "number on the module, or take the item outside of the call and pass it in."
    ),
    "generator": (
        "A program draws from torch's default generator only. Leave generator= out, or draw outside of the call and "
        "pass the numbers in as a tensor."
    ),
    "gpu": (
        "There is no GPU here. Without one torch.cuda says that there is one, and of which kind, if capability= names "
        "one alone. Ask for the rest outside of forward, or make the program where there is a GPU."
    ),
    "devices": (
        "Tensors on a CPU and on a GPU meet here, as they would where there is a GPU. Make what forward makes where "
        "the other is: torch.arange(n, device=x.device)."
    ),
    "other": "This line cannot be traced, or it fails for these inputs.",
}


class Untraceable(Exception):
    """Raised where it happens, so that the traceback leads to the line.

    Attributes:
        kind: a key of the advice; "value" for a value that is read, for a condition or a number.
        line: file and number of the user's line, where the traceback does not lead to it.

    Args:
        what: names the operator or the tensor.
    """

    def __init__(self, kind: str, what: str, line: tuple[str, int] | None = None) -> None:
        super().__init__(what)
        self.kind = kind
        self.line = line


class Located(CaptureError):
    """An error whose message names the line of the user's code already; it is raised anew as a CaptureError."""


def advice(kind: str) -> str:
    """What to do about it."""
    return _ADVICE[kind]


def is_users(file: str) -> bool:
    """Whether a source file is neither torch's, nor graphshard's, nor the standard library's."""
    # Packages, such as the one the model comes from, may lie below the standard library's directory.
    in_stdlib = file.startswith(_STDLIB) and not file.startswith(_PACKAGES)
    return not (in_stdlib or file.startswith((_TORCH, HERE, "<")))

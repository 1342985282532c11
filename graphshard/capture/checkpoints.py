"""Carry the user's `torch.utils.checkpoint` regions into the joint graph.

A trace has no checkpoints: that a function was checkpointed would be forgotten. While a module is captured, every form
of checkpointing is therefore routed through an annotation of the nodes that are traced:

    checkpoint(f, x, use_reentrant=False)    composable checkpoint(module)    -> _checkpoint_without_reentrant_generator
    checkpoint(f, x, use_reentrant=True)                                      -> CheckpointFunction
    checkpoint_wrapper(module)                                                -> either

The annotation becomes torch's own marks: `ac_graph_id` says to which region a node belongs, `recompute` what the
partitioner does with it. It also says which nodes eager mode runs again, for what they write (`written_again.py`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._composable import checkpoint_activation
from torch.fx import GraphModule, Node
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from graphshard.capture.boundaries import as_results, through_leaves
from graphshard.capture.draws import NoDraws
from graphshard.capture.outside import exchanged, namespaces_of
from graphshard.capture.saved_hooks import SavedHooks
from graphshard.capture.untraceable import Located, Untraceable, is_users
from graphshard.ir.errors import CaptureError
from graphshard.ir.graph import is_backward, is_part
from graphshard.ir.recomputed import RECOMPUTE, SAVE, maker_of, save_leaving
from graphshard.ir.torch_internals import hooks_while_tracing, number_of_backward, replaced

_KEY = "graphshard_checkpoint"
# How often eager mode runs a node again in backward.
REPEATED = "graphshard_repeated"
# To which region a node of backward belongs.
BACKWARD_OF = "graphshard_backward_of"
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
# The policy of a selective checkpoint: called with a context, an operator and its arguments.
_PolicyFn = Callable[..., Any]


class _EnterRegion(Protocol):
    def __call__(self, *, reentrant: bool) -> Callable[[], Located | None]: ...


def _leave_nothing(*, reentrant: bool) -> Callable[[], Located | None]:
    return lambda: None


@dataclass
class CheckpointRegions:
    """The checkpointed regions of one capture, in order of execution.

    Attributes:
        namespaces: globals of the user's modules.
        policies: what is saved of each; None for a full checkpoint.
        ends: how many tensors autograd has saved in each when eager mode stops to run it again; None: at its end.
        visits: the backward passes that read what was saved in each, before each of which eager mode runs it again.
        refusals: errors for what each leaves on modules, if eager mode runs it again.
        enter_region: called when a region begins; what it returns is called at its end, and returns such an error.
        buffers: what buffers hold now, by name; something else after each write.
        written: the buffers that regions write.
        saved_hooks: the user's own hooks of saved tensors.
    """

    namespaces: Sequence[dict[str, Any]] = ()
    policies: list[_PolicyFn | None] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)
    visits: list[set[int]] = field(default_factory=list)
    refusals: list[Located | None] = field(default_factory=list)
    enter_region: _EnterRegion = _leave_nothing
    buffers: Callable[[], dict[str, Any]] = dict
    written: set[str] = field(default_factory=set)
    saved_hooks: SavedHooks = field(default_factory=SavedHooks)
    depth: int = 0
    _packed: list[list[torch.Tensor]] = field(default_factory=list)

    @contextlib.contextmanager
    def enter(
        self, policy: _PolicyFn | None, *, stops_early: bool, reentrant: bool = False, draws_anew: bool = False
    ) -> Iterator[None]:
        """What is traced inside belongs to a new region. A checkpoint within a checkpoint belongs to the outer one."""
        self.depth += 1
        draws_anew = draws_anew and torch.is_grad_enabled()
        drawing = NoDraws(_draws_anew) if draws_anew else contextlib.nullcontext()
        try:
            if self.depth > 1:
                with drawing:
                    yield
            else:
                self.saved_hooks.check_region()
                leave, before = self.enter_region(reentrant=reentrant), self.buffers()
                with self._counting(policy) as count, drawing:
                    yield
                self.written |= {name for name, value in self.buffers().items() if value is not before[name]}
                self.ends[-1] = count() if stops_early else None
                self.refusals[-1] = leave()
        finally:
            self.depth -= 1

    @contextlib.contextmanager
    def no_questions(self) -> Iterator[None]:
        """In the block, code of the user's that asks whether gradients are enabled is an error: there are two answers.

        Eager mode runs a reentrant region without gradients, and again, with them, in backward.
        """
        ask = torch.is_grad_enabled

        def answer() -> bool:
            if ask() and is_users(sys._getframe(1).f_code.co_filename):
                raise Untraceable("reentrant", "torch.is_grad_enabled")
            return ask()

        with exchanged({id(ask): answer}, [vars(torch), *self.namespaces]):
            yield

    def forget_saved(self) -> None:
        """Let go of what autograd has saved, when nothing more is differentiated."""
        for packed in self._packed:
            packed.clear()

    def check_effects(self) -> None:
        """Raise the error for what a region leaves on modules that eager mode runs again."""
        for refusal, visits in zip(self.refusals, self.visits, strict=True):
            if refusal is not None and visits:
                raise refusal

    @contextlib.contextmanager
    def _counting(self, policy: _PolicyFn | None) -> Iterator[Callable[[], int]]:
        """Nodes are annotated with the region and with how many tensors autograd has saved in it before."""
        region, saved, visits = len(self.policies), 0, set[int]()
        self.policies.append(policy)
        self.ends.append(None)
        self.visits.append(visits)
        self.refusals.append(None)
        with contextlib.ExitStack() as annotation:
            annotation.enter_context(annotate({_KEY: (region, saved)}))

            def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
                nonlocal saved
                saved += 1
                annotation.close()
                annotation.enter_context(annotate({_KEY: (region, saved)}))
                # Not the tensor itself: a result that its own graph holds is never freed if no backward comes there.
                self._packed.append([tensor])
                return self._packed[-1]

            def unpack(packed: list[torch.Tensor]) -> torch.Tensor:
                visits.add(number_of_backward())
                return packed[0]

            with hooks_while_tracing(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield lambda: saved


@contextlib.contextmanager
def trace_checkpoints(module: nn.Module) -> Iterator[CheckpointRegions]:
    """While this is open, checkpointed functions are traced as what they are, and their nodes annotated."""
    regions = CheckpointRegions(namespaces_of(module))

    def region(context_fn: Any, early_stop: bool, preserve: bool) -> Generator[None, None, None]:
        switched = torch_checkpoint._enable_checkpoint_early_stop
        stops_early = early_stop if switched is None else switched
        with regions.enter(_policy_of(context_fn), stops_early=stops_early, draws_anew=not preserve):
            yield

    def without_reentrant(context_fn: Any, early_stop: bool, preserve: bool) -> Iterator[None]:
        # Torch 2.11 does not tell the region of an error in it: it would end when the error is let go of.
        return stack.enter_context(contextlib.closing(region(context_fn, early_stop, preserve)))

    def by_place(
        _fn: Any,
        preserve: bool = True,
        context_fn: Any = None,
        _determinism: Any = None,
        _debug: bool = False,
        early_stop: bool = True,
        *_: Any,
        **__: Any,
    ) -> Iterator[None]:
        return without_reentrant(context_fn, early_stop, preserve)

    def by_name(
        *_: Any, context_fn: Any = None, early_stop: bool = True, preserve_rng_state: bool = True, **__: Any
    ) -> Iterator[None]:
        return without_reentrant(context_fn, early_stop, preserve_rng_state)

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        # Eager mode differentiates the region by itself: it adds to the gradients of its inputs at once, in leaves.
        with regions.enter(None, stops_early=False, reentrant=True, draws_anew=not preserve), regions.no_questions():
            outputs = function(*through_leaves(args))
        if not torch.is_grad_enabled():
            return outputs
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
        if not inputs:
            warnings.warn(
                "torch.utils.checkpoint with use_reentrant=True: none of the inputs requires a gradient, so nothing "
                "inside receives one, parameters included. Use use_reentrant=False.",
                stacklevel=2,
            )
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        return as_results(outputs, inputs)

    generator = "_checkpoint_without_reentrant_generator"
    with contextlib.ExitStack() as stack:
        for owner in (torch_checkpoint, checkpoint_activation):
            if hasattr(owner, f"{generator}_impl"):  # torch 2.15, where nothing in torch calls the other
                stack.enter_context(replaced(owner, f"{generator}_impl", by_name))
            else:
                stack.enter_context(replaced(owner, generator, by_place))
        stack.enter_context(replaced(torch_checkpoint.CheckpointFunction, "apply", reentrant))
        stack.enter_context(preserve_node_meta())
        stack.enter_context(regions.saved_hooks.traced())
        yield regions
        # What was there knows tensors of the trace, which are not to outlive it.
        regions.enter_region, regions.buffers = _leave_nothing, dict


def _draws_anew(func: Any) -> Untraceable:
    """What a checkpoint with preserve_rng_state=False draws, eager mode draws anew in backward."""
    return Untraceable("draws anew", f"operator {func}")


def _policy_of(context_fn: Callable[[], tuple[Any, Any]] | None) -> _PolicyFn | None:
    """The policy of `create_selective_checkpoint_contexts`; None where nothing is selected."""
    if context_fn is None:
        return None
    context, _ = context_fn()
    if isinstance(context, torch_checkpoint._CachingTorchDispatchMode):
        return context.policy_fn
    if isinstance(context, contextlib.nullcontext):
        return None
    raise CaptureError(
        f"the context_fn of torch.utils.checkpoint returns a {type(context).__name__}, which cannot be traced. Return "
        "what torch.utils.checkpoint.create_selective_checkpoint_contexts makes, or leave context_fn out."
    )


def mark_checkpoints(joint: GraphModule, regions: CheckpointRegions) -> None:
    """Turn the annotations of the forward nodes of a joint graph into marks for the partitioner."""
    decisions: dict[Node, bool] = {}
    for node in list(joint.graph.nodes):
        custom = node.meta.pop("custom", {})
        if node.op == "call_function" and _KEY in custom and not is_backward(node):
            region, saved = custom[_KEY]
            end = regions.ends[region]
            # Eager mode asks about operators, not about the selection of one of their results.
            maker = maker_of(node) if is_part(node) else node
            if maker not in decisions:
                decisions[maker] = _is_saved(maker, regions.policies[region])
            node.meta["ac_graph_id"] = region
            node.meta["recompute"] = SAVE if decisions[maker] else RECOMPUTE
            reached = regions.visits[region] and (end is None or saved < end)
            if reached and not decisions[maker]:
                node.meta[REPEATED] = len(regions.visits[region])
        elif node.target is torch.ops.aten.detach.default and _KEY in custom:
            # Autograd unpacks what `pack` was given as another tensor.
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
        elif is_backward(node) and _KEY in custom:
            node.meta[BACKWARD_OF] = custom[_KEY][0]
    save_leaving(joint.graph)


def _is_saved(node: Node, policy_fn: _PolicyFn | None) -> bool:
    # Eager mode asks no policy about the operators of the set.
    if policy_fn is None or node.target in torch_checkpoint.SAC_IGNORED_OPS:
        return False
    args, kwargs, output = torch.fx.map_arg((node.args, node.kwargs, node), lambda n: n.meta["val"])
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output  # torch 2.11 has none
    return policy_fn(context, node.target, *args, **kwargs) in (True, *_SAVED)

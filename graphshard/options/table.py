"""The parameter table of a model and a user's options, checked: what `compile` runs with and `explain` predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.distributed.tensor import Shard

from graphshard.ir.mesh import Mesh
from graphshard.ir.params import ParamTable, build_table
from graphshard.ir.precision import Precision
from graphshard.options.checks import check_ignored, check_params, check_placements


def checked_table(
    model: nn.Module,
    unit_names: Sequence[str],
    *,
    device_type: str,
    mesh: Mesh,
    precision: Precision,
    reshard_after_forward: bool | None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None,
    ignored_params: Iterable[nn.Parameter] | None,
) -> ParamTable:
    """The table of a model that is to be sharded; the options are those of `graphshard.compile`.

    Args:
        unit_names: modules whose parameters are gathered together, as `find_units` found them.
        device_type: kind of devices that the model will be on.
        precision: the policies of the units.

    Raises:
        ArgumentError: an option does not fit the model, or a parameter cannot be sharded.
    """
    ignored = check_ignored(model, ignored_params)
    check_params(model, device_type, ignored)
    return build_table(
        model,
        mesh=mesh,
        units=unit_names,
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        dims=check_placements(model, shard_placement_fn, ignored),
        ignored=ignored,
    )

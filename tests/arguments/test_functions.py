"""For any argument a public function raises a graphshard error that names the argument and shows the value."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests.arguments.table import INPUTS, Row, rows
from tests.helpers import Blocks
from tests.ranks import reset_distributed

ROOT = Path(__file__).parents[2]
# Functions without arguments, classes of errors and results, and aliases of another row.
WITHOUT_ROWS = {
    "unsharded_init()",
    *("export(sign)", "load(trust)"),  # covered by tests/aot/test_signing.py
    *(f"explain_grid({name})" for name in ("model", "example_inputs", "example_kwargs", "symbols", "every_block")),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Row]]]:
    """Return rows by function, for one rank with real collectives."""
    folder = tmp_path_factory.mktemp("arguments")
    reset_distributed()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        file = graphshard.export(Blocks(1), (1,), folder / "good.gshard", example_inputs=INPUTS, backend="eager")
        compiled = graphshard.compile(Blocks(1), mesh, backend="eager", example_inputs=INPUTS)
        found: dict[str, list[Row]] = {}
        for row in rows(folder, mesh, compiled, file):
            found.setdefault(name_of(row), []).append(row)
        yield found
    finally:
        reset_distributed()


def name_of(row: Row) -> str:
    return getattr(row.function, "__name__", "")


FUNCTIONS = (
    *("compile", "fully_shard", "export", "Call", "of_a_call", "load", "explain", "explain_grid", "what_if", "bisect"),
    *(
        "programs",
        "register_forward_method",
        "uncompiled",
        "unsharded",
        "rebuild",
        "compile_step",
        "measure_regions",
        "profile_step",
        "load_profile",
        "from_json",
    ),
    *("load_measured", "save_measured", "schedule_graph", "Group"),
    *("latest_checkpoint", "save_checkpoint", "async_save_checkpoint", "load_checkpoint"),
    *("Pipeline", "insert", "replace", "<lambda>"),
    *("PlanByUnit", "set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward"),
    *("set_reshard_after_backward", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor"),
    *("unshard", "reshard", "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
)


# Parameters that explain lacks.
OF_ITS_OWN = {
    "explain_grid": ("meshes", "hardware", "network", "settings", "show", "workers"),
    "what_if": ("changes", "ranks", "show"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_malformed_values(table: dict[str, list[Row]], function: str) -> None:
    """Every value is rejected with graphshard's errors, and the model does not change."""
    threads = torch.get_num_threads()
    faults = {f"{function}({row.parameter})": row.faults() for row in table[function]}
    assert not {name: found for name, found in faults.items() if found}
    assert torch.get_num_threads() == threads


def test_every_function_and_parameter_has_a_row(table: dict[str, list[Row]]) -> None:
    assert table.keys() == set(FUNCTIONS)
    known = {f"{name}({row.parameter})" for name, found in table.items() for row in found}
    public = {name: getattr(graphshard, name) for name in graphshard.__all__}
    for name, function in public.items():
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters or {"": None}
            wanted = {f"{name}({parameter})" for parameter in parameters}
            if name in OF_ITS_OWN:  # the others equal explain's, and are made by a grid and answers
                shown = inspect.signature(inspect.unwrap(function)).parameters
                wanted = {f"{name}({p})" for p in shown} & known | {f"{name}({p})" for p in OF_ITS_OWN[name]}
            assert wanted - known <= WITHOUT_ROWS, name


def test_the_number_of_calls_equals_the_manual(table: dict[str, list[Row]]) -> None:
    calls = Counter({name: sum(len(row.values) for row in found) for name, found in table.items()})
    page = (ROOT / "docs/evidence/robustness.md").read_text()
    assert f"| malformed arguments of public functions | {calls.total():,} |" in page

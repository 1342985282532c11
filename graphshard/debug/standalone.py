"""Executors and regions as Python files that run on their own, with made-up inputs.

python forward.py                           one process, collectives that return at once
torchrun --nproc-per-node 8 forward.py      real collectives
python regions/region_0.py                  one region
"""

from __future__ import annotations

import copy
import re

import torch
from torch.fx import Node

from graphshard.errors import visible
from graphshard.ir.graph import OWN
from graphshard.ir.mesh import Mesh
from graphshard.ir.program import Phase, Program, Region
from graphshard.ir.recompute import RANDOM_STATE
from graphshard.lower.executor import lines_of
from graphshard.lower.executor_lines import print_lines
from graphshard.runtime.process_groups import bind_groups
from graphshard.torch_compat.aot_autograd import run_with_rng_state
from graphshard.torch_compat.symbolic_sizes import hint

_IMPORTS = """\
import torch
from torch import device, inf, nan
"""

_RUN_REGION = """

if __name__ == "__main__":
    for result in {name}(*inputs()):
        print(result.dtype, list(result.shape))
"""

_RUN_PHASE = """

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size={size})
    assert dist.get_world_size() == {size}, "the program is for {size} ranks"
    ranks = torch.arange({size}).view({shape})
{groups}    for name, result in zip({outputs}, Executor().forward(inputs())):
        print(name, result if result is None else (result.dtype, list(result.shape)))
    dist.destroy_process_group()
"""


def region_source(region: Region, name: str) -> str:
    """A file with a region's operators as a function `name`."""
    graph = region.module.graph
    code = re.sub(r"def forward\(self(, )?", f"def {name}(", region.module.code)
    return (
        f'"""Region {region.key}, operator by operator."""\n\n{_IMPORTS}\n\n'
        f"{code.strip()}\n\n\n{_inputs(graph.find_nodes(op='placeholder'))}{_RUN_REGION.format(name=name)}"
    )


def executor_source(program: Program, phase_name: str) -> str:
    """A file with the code of an executor, as it runs, over the files of its regions."""
    phase = program.phases[phase_name]
    names = dict.fromkeys(str(n.target) for n in phase.module.graph.find_nodes(op="call_module"))
    imports = "".join(f"from regions.{name} import {name}\n" for name in names)
    methods = "".join(f"    def {name}(self, inputs):\n        return {name}(*inputs)\n\n" for name in names)
    code = "".join(f"    {line}\n" if line else "\n" for line in _code(program, phase).strip().splitlines())
    outputs = [str(slot) for slot in phase.outputs]
    mesh = program.mesh
    run = _RUN_PHASE.format(size=mesh.size, shape=[*mesh.shape.values()], groups=_groups(mesh), outputs=outputs)
    own = any(node.target in OWN for node in phase.module.graph.nodes)
    operators = "import graphshard.ir.operators  # copies between host and device, own_chunk\n" if own else ""
    title = visible(program.title, lines=False).translate({ord('"'): "'", ord("\\"): "/"})  # it must not end the text
    return (
        f'"""The {phase_name} of {title} on every rank; regions run operator by operator."""\n\n'
        f"import os\n\n{_IMPORTS}import torch.distributed as dist\n{operators}{imports}\n\n"
        f"class Executor:\n    groups = {{}}  # names of process groups by mesh axis\n\n{methods}{code}\n\n"
        f"{_inputs(phase.placeholders, [str(slot) for slot in phase.inputs])}{run}"
    )


class _Expression(str):
    """Text that is written into code as it is."""

    def __repr__(self) -> str:
        return str(self)


def _groups(mesh: Mesh) -> str:
    """Make the process groups along each axis: those of neighbours lie one behind another on it, too."""
    rows = "dist.new_subgroups_by_enumeration({ranks}.movedim({place}, -1).reshape(-1, {size}).tolist())[0].group_name"
    made = [(axis.name, rows.format(ranks="ranks", place=mesh.place(axis), size=axis.size)) for axis in mesh.axes]
    if (experts := mesh.experts) is not None:  # which may be on as many ranks, or there is one for each part of them
        ranks = f"ranks.view(-1, {', '.join(map(str, experts.shape.values()))})"
        own = [axis for axis in experts.axes if axis not in mesh.axes]
        made += [(a.name, rows.format(ranks=ranks, place=experts.place(a) + 1, size=a.size)) for a in own]
    return "".join(f"    Executor.groups[{name!r}] = {group}\n" for name, group in made)


def _code(program: Program, phase: Phase) -> str:
    """The executor's code, with the groups that the file makes."""
    graph = copy.deepcopy(phase.module.graph)
    bind_groups(graph, {axis.name: _Expression(f"self.groups[{axis.name!r}]") for axis in program.mesh.every_axis})
    return print_lines(lines_of(graph))


def _inputs(placeholders: list[Node], labels: list[str] | None = None) -> str:
    """A function that makes inputs of the traced shapes, strides and dtypes: zeros, or small random numbers.

    Dynamic sizes are those of the capture.
    """
    lines = []
    for index, node in enumerate(placeholders):
        val = node.meta["val"]
        label = f"  # {visible(labels[index], lines=False)}" if labels else ""
        if node.meta.get(RANDOM_STATE) or any(user.target is run_with_rng_state for user in node.users):
            lines.append(f"        torch.get_rng_state(),{label}\n")
            continue
        if isinstance(val, torch.SymInt):
            lines.append(f"        {hint(val)},{label}\n")
            continue
        fill = ".normal_(std=0.02)" if val.is_floating_point() else ".zero_()"
        shape, stride = (tuple(map(hint, sizes)) for sizes in (val.shape, val.stride()))
        make = f"torch.empty_strided({shape}, {stride}, dtype={val.dtype}, device={val.device.type!r})"
        lines.append(f"        {make}{fill},{label}\n")
    return f"def inputs():\n    return [\n{''.join(lines)}    ]\n"

"""Dynamic sizes: captured, carried through passes and regions, printed, stored; what fits and what does not."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.export import Dim

import graphshard
from graphshard.capture.fit import misfit
from graphshard.codec.stage import program_from_json, program_to_json
from graphshard.ir.printer import print_phase, print_program
from graphshard.ir.program import Program
from graphshard.ir.sizes import lift_sizes
from graphshard.lower.backends import compiler_for
from graphshard.lower.regions import cut, lower
from graphshard.passes import ActivationCheckpointing, DropUnusedTangents
from graphshard.pipeline.pipeline import run_pass
from tests.helpers import captured, full_gradients, mean_gradients, step, through
from tests.ranks import FakeWorld


class _Text(nn.Module):
    """A language model in small."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            heads = layer(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(0, 1) * self.w).sin().sum()


class _Branch(nn.Module):
    """Another computation from 6 rows on; the width is fixed by the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum() if x.shape[0] > 5 else (x * self.w).mean()


class _Area(_Branch):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w[0]).sum() if x.numel() > 20 else (x * self.w[0]).mean()


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x + y) * self.w).sum()


class _Logits(nn.Module):
    """Loss and logits: the zero tangent of the logits is as large as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return logits.logsumexp(-1).mean(), logits.clamp(min=0)


TOKENS = torch.zeros(4, 6, dtype=torch.int64)
BOTH = {0: Dim("batch"), 1: Dim("sequence", max=64)}
SHAPES = [(2, 2), (3, 5), (4, 6), (5, 3), (7, 64), (64, 2)]


def _dynamic(model: nn.Module, *, args: tuple[Any, ...] = (TOKENS, TOKENS), shapes: Any = (BOTH, BOTH)) -> Program:
    return captured(model, args, dynamic_shapes=shapes)


def _batch(shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, 11, (2, *shape), generator=torch.Generator().manual_seed(seed))
    return tokens, targets


def test_sizes_are_inputs_of_both_phases() -> None:
    """Sizes are inputs of their own, named in order; both phases compute what they need from them."""
    program = captured(_Flat(), (torch.ones(2, 3, 4),), dynamic_shapes=({0: Dim("a"), 1: Dim("b")},), world_size=1)
    through(program, "partition")
    assert_expected_inline(
        print_program(program),
        """\
forward:
  %0: f32[4] = param:w
  %1: f32[s0, s1, 4] = input:0
  %3: s0 = size:s0
  %4: s1 = size:s1
  %5: s0*s1 = mul(%3, %4)
  %6: f32[s0*s1, 4] = view(%1, [%5, 4])
  %7: f32[s0*s1, 4] = mul.Tensor(%6, %0)
  %8: f32[s0*s1, 4] = sin(%7)
  %9: f32[] = sum(%8)
  return %9 as output:0
  return %0 as param:w
  return %1 as input:0

backward:
  %0: f32[4] = param:w
  %1: f32[s0, s1, 4] = input:0
  %2: f32[] = tangent:0
  %16: s0 = size:s0
  %17: s1 = size:s1
  %18: s0*s1 = mul(%17, %16)
  %10: f32[s0*s1, 4] = expand(%2, [%18, 4])
  %6: f32[s0*s1, 4] = view(%1, [%18, 4])
  %7: f32[s0*s1, 4] = mul.Tensor(%6, %0)
  %11: f32[s0*s1, 4] = cos(%7)
  %12: f32[s0*s1, 4] = mul.Tensor(%10, %11)
  %13: f32[s0*s1, 4] = mul.Tensor(%12, %6)
  %14: f32[1, 4] = sum.dim_IntList(%13, [0], True)
  %15: f32[4] = view(%14, [4])
  return %15 as grad:w
""",
    )


@pytest.mark.parametrize("policy", [None, "full"])
def test_one_program_computes_every_shape(policy: Any) -> None:
    """One program computes what eager mode computes at every shape; shapes differ between the ranks."""
    torch.manual_seed(0)
    model = _Text()
    program = _dynamic(model)
    if policy:
        run_pass(ActivationCheckpointing(policy), program)
    through(program, "reorder")
    for seed, shape in enumerate(SHAPES):
        batches = [_batch(shape, seed), _batch(SHAPES[seed - 1], seed)]
        results = step(program, model, batches)
        for result, batch in zip(results, batches):
            assert torch.equal(result["output:0"], model(*batch))
        torch.testing.assert_close(full_gradients(program, results), mean_gradients(model, batches))


def test_bits_are_those_of_a_capture_of_that_shape() -> None:
    torch.manual_seed(0)
    model = _Text()
    program = through(_dynamic(model), "reorder")
    for shape in SHAPES[1:4]:
        batches = [_batch(shape), _batch(shape, 1)]
        fixed = through(captured(model, batches[0]), "reorder")
        found = (full_gradients(p, step(p, model, batches)) for p in (program, fixed))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_inference_with_dynamic_sizes() -> None:
    model = _Text(depth=1)
    program = captured(model, (TOKENS, TOKENS), dynamic_shapes=(BOTH, BOTH), grad=False)
    through(program, "reorder")
    assert [str(slot) for slot in program.phases["forward"].inputs][-2:] == ["size:s0", "size:s1"]
    batch = _batch((3, 9))
    assert torch.equal(step(program, model, [batch, batch])[0]["output:0"], model(*batch))


def test_regions_do_not_depend_on_the_example() -> None:
    """Equal blocks give equal regions, and programs of other example sizes the same: ranks compile the same."""
    keys = []
    for shape in ((4, 6), (3, 17)):
        program = through(_dynamic(_Text(depth=4), args=_batch(shape)), "reorder")
        found = {name: [call.region.key for call in cut(phase)] for name, phase in program.phases.items()}
        keys.append(found)
        assert len(set(found["forward"])) < len(found["forward"])
    assert keys[0] == keys[1]


def test_zero_tangent_of_a_dynamic_size() -> None:
    """Where a zero must be there, it is as large as this call's batch."""
    model, x = _Logits(), torch.randn(5, 4)
    program = through(_dynamic(model, args=(torch.ones(3, 4),), shapes=({0: Dim("batch")},)), "partition")
    run_pass(DropUnusedTangents(frozenset({"0"})), program)
    through(program, "bucket")
    results = step(program, model, [(x,), (x,)])
    model(x)[0].backward()
    torch.testing.assert_close(full_gradients(program, results)["head.weight"], model.head.weight.grad)


def test_lifting_twice_changes_nothing() -> None:
    program = through(_dynamic(_Text()), "partition")
    before = print_program(program)
    for phase in program.phases.values():
        lift_sizes(phase, program.sizes)
    assert print_program(program) == before


def test_executor_computes_sizes_and_frees_values() -> None:
    program = through(_dynamic(_Text()), "reorder")
    lower(program, compiler_for("eager"), {})
    text = print_phase(program.phases["backward"])
    assert "= size:s0" in text
    assert "mul" not in "".join(line for line in text.splitlines() if "region" not in line)


# --- what fits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (_batch((9, 9)), ""),
        ((TOKENS, TOKENS[:3]), r"input 1 has shape \(3, 6\), the program was captured for \(s0, s1\)"),
        (_batch((1, 9)), "s0 is 1; sizes of 0 and 1 broadcast and have programs of their own"),
        (_batch((3, 65)), "s1 is 65, outside of 2 to 64"),
        ((TOKENS.t(), TOKENS.t()), r"input 0 has strides \(1, 6\), the program was captured for \(s1, 1\)"),
    ],
)
def test_fit(inputs: tuple[Tensor, ...], why: str) -> None:
    program = _dynamic(_Text(depth=1))
    assert re.fullmatch(why, misfit(program, inputs))


def test_what_the_code_took_for_granted() -> None:
    program = _dynamic(_Branch(), args=(torch.ones(4, 6),), shapes=({0: Dim.AUTO},))
    assert misfit(program, [torch.ones(5, 6)]) == ""
    assert misfit(program, [torch.ones(6, 6)]) == "s0 is 6, outside of 2 to 5"
    area = _dynamic(_Area(), args=(torch.ones(4, 4),), shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert misfit(area, [torch.ones(2, 10)]) == ""
    assert misfit(area, [torch.ones(3, 7)]) == "the program holds where s0*s1 <= 20"


def test_equal_sizes_that_nobody_declared_equal() -> None:
    """Dim.AUTO finds out, and a call that differs does not fit."""
    program = _dynamic(_Sum(), args=(torch.ones(4), torch.ones(4)), shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    assert [size.name for size in program.sizes] == ["s0"]
    assert misfit(program, [torch.ones(7), torch.ones(7)]) == ""
    assert "input 1 has shape (6,)" in misfit(program, [torch.ones(7), torch.ones(6)])


def test_a_size_that_turns_out_to_be_one_number() -> None:
    """As the compilation of a region may find."""
    program = _dynamic(_Sum(), args=(torch.ones(4), torch.ones(4)), shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    (size,) = program.sizes
    assert size.value == 4  # a guard
    assert misfit(program, [torch.ones(4), torch.ones(4)]) == ""
    assert misfit(program, [torch.ones(7), torch.ones(7)]) == "s0 is 7, outside of 4 to 4"
    again = program_from_json(program_to_json(program))
    assert misfit(again, [torch.ones(4), torch.ones(4)]) == ""
    assert "7" in misfit(again, [torch.ones(7), torch.ones(7)])


def test_marked_dimensions() -> None:
    x = torch.ones(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.maybe_mark_dynamic(x, 1)  # fixed by the parameter: nothing is said
    (size,) = _dynamic(_Branch(), args=(x,), shapes=None).sizes
    assert size.source == (0, 0)


def test_a_size_of_one_is_fixed() -> None:
    """And its capture stays dynamic in the other dimension."""
    (size,) = _dynamic(_Text(depth=1), args=_batch((1, 9))).sizes
    assert size.source == (0, 1)


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "args", "shapes", "message"),
    [
        (_Branch(), (torch.ones(4, 6),), ({1: Dim("n")},), "marked n as dynamic but your code specialized it to be a"),
        (_Branch(), (torch.ones(4, 6),), ({0: Dim("n")},), r"n = Dim\('n', max=5\)"),
        (_Sum(), (torch.ones(4),) * 2, ({0: Dim("b")}, {0: Dim("c")}), "must always be equal"),
    ],
)
def test_dimensions_that_cannot_be_dynamic(model: nn.Module, args: Any, shapes: Any, message: str) -> None:
    with pytest.raises(graphshard.CaptureError, match=message) as error:
        _dynamic(model, args=args, shapes=shapes)
    assert str(error.value).startswith(f"graphshard cannot capture {type(model).__name__}.forward with the dimensions")
    assert "declare them as Dim.AUTO" in str(error.value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: Dim.AUTO}}, "dynamic_shapes names 'z', the call's inputs are 'x'"),
        (({0: Dim.AUTO}, None), "dynamic_shapes has 2 entries, the call has 1 inputs"),
        (({2: Dim.AUTO},), "dynamic_shapes: x has 2 dimensions, there is no dimension 2"),
        (({0: 2 * Dim("half")},), "declare the dimension that it derives from in dynamic_shapes"),
    ],
)
def test_wrong_declarations(shapes: Any, message: str) -> None:
    with pytest.raises(graphshard.GraphshardError, match=message):
        _dynamic(_Branch(), args=(torch.ones(4, 6),), shapes=shapes)


def test_size_outside_of_its_range() -> None:
    with pytest.raises(graphshard.InputError, match=r"tokens has size 65 in dimension 1, .* 'sequence' from 0 to 64"):
        _dynamic(_Text(), args=_batch((3, 65)))


def test_dynamic_shapes_is_no_structure(fake_world: FakeWorld) -> None:
    fake_world(2)
    with pytest.raises(graphshard.ArgumentError, match=r"dynamic_shapes must be a tuple .*, or a dict .*, got int"):
        graphshard.compile(_Flat(), init_device_mesh("cpu", (2,)), dynamic_shapes=3)


def test_nested_inputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, pair: list[Tensor], options: dict[str, Any]) -> Tensor:
            return (pair[0] * self.w).sum() * options["scale"] + options["x"].sum()

    args = [torch.ones(3, 2), torch.ones(2)], {"x": torch.ones(5), "scale": 2}
    shapes = {"pair": [{0: Dim("a")}, None], "options": {"x": (Dim("b"),), "scale": None}}
    assert [size.source for size in _dynamic(Nested(), args=args, shapes=shapes).sizes] == [(0, 0), (2, 0)]


# --- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["capture", "partition", "reorder"])
def test_stages_are_stored(last: str) -> None:
    program = _dynamic(_Text())
    if last != "capture":
        through(program, last)
    text = program_to_json(program)
    found = program_from_json(text)
    assert program_to_json(found) == text
    assert print_program(found) == print_program(program)
    if last == "capture":
        through(found, "reorder")


@pytest.mark.parametrize("size", ["__import__('os')", "s0.node", "s9", "s0 if s0 else 1", "Max(*s0)", "(" * 999])
def test_a_file_can_hold_nothing_but_arithmetic(size: str) -> None:
    data = json.loads(program_to_json(_dynamic(_Text(depth=1))))
    data["shapes"][0][0][0] = {"size": size}
    with pytest.raises(graphshard.ArgumentError, match="is no size"):
        program_from_json(json.dumps(data))


def test_dump_and_report_of_dynamic_sizes(fake_world: FakeWorld, tmp_path: Path) -> None:
    """Every file of a dump is written, and the next shape makes no other."""
    fake_world(2)
    model = graphshard.compile(
        _Text(),
        init_device_mesh("cpu", (2,)),
        backend="eager",
        dynamic_shapes=(BOTH, BOTH),
        activation="full",
        dump=tmp_path,
    )
    for shape in SHAPES:
        model(*_batch(shape)).backward()
    assert len(graphshard.programs(model)) == 1
    (folder,) = (tmp_path / "rank0").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"saved.txt", "index.html", "forward.py", "backward.py", "plan.json"} <= names
    assert "size:s1" in (folder / "00-capture.txt").read_text()
    assert "total" in (folder / "saved.txt").read_text()


def test_deep_copies_of_programs_keep_sizes() -> None:
    program = through(_dynamic(_Text(depth=1)), "partition")
    clones = {name: phase.clone() for name, phase in program.phases.items()}
    assert {n: print_phase(p) for n, p in clones.items()} == {n: print_phase(p) for n, p in program.phases.items()}
    assert copy.copy(program).sizes == program.sizes

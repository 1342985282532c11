"""Formulas: symbolic sizes of a graph, and a step's time and memory in them."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import sympy
import torch
from torch import nn

import graphshard
from graphshard.errors import ArgumentError
from graphshard.ir.sizes import SYMBOLS
from graphshard.options.options import Options
from graphshard.passes import Float8AllGather, MakePlan, OffloadParameters
from graphshard.predict.study import Study
from tests.helpers import COALESCED
from tests.predict.test_explain import BF16, TOKENS, meta_net

SECONDS = ("step_time_s", "compute_s", "optimizer_s", "communication_s", "exposed_comm_s")
# Without host time, which does not shrink with the batch and delays what small batches could overlap.
H100 = replace(
    graphshard.profiling.load_profile("h100"), host_seconds={"eager": 0.0, "compiled": 0.0}, kernel_seconds=3e-6
)
OPTIONS = Options(mp_policy=BF16, passes=graphshard.Pipeline().replace("plan", MakePlan(COALESCED)))
SYMBOLIC = {"batch": 0, "seq": 1}


@functools.cache
def explained(batch: int, seq: int, ranks: int) -> graphshard.Explanation:
    """Explain the step at some sizes; with formulas at the first ones."""
    symbols = SYMBOLIC if (batch, seq) == tuple(TOKENS.shape) else None
    inputs = (torch.zeros(batch, seq, dtype=torch.long),)
    return Study(meta_net(), inputs, None, OPTIONS, symbols=symbols).explain((ranks,), H100, "isolated")


@pytest.fixture(scope="module")
def formulas() -> graphshard.predict._symbolic_cost.Formulas:
    """Return the formulas of 256 tokens on 8 ranks."""
    found = explained(*TOKENS.shape, 8).formulas
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("batch", "seq", "ranks"), [(2, 128, 8), (8, 128, 8), (3, 200, 8), (2, 128, 64), (1, 512, 256)]
)
@pytest.mark.slow
def test_formulas_equal_numbers(formulas, batch, seq, ranks):
    """At the explained sizes and at others they equal the numeric prediction, up to rounding."""
    found = formulas.evaluate(batch=batch, seq=seq, ranks=ranks)
    expected = explained(batch, seq, ranks)
    for name in SECONDS:
        assert found[name] == pytest.approx(getattr(expected, name), rel=1e-9), name
    assert found["state_bytes"] == pytest.approx(
        sum(p.numel() for p in meta_net().parameters()) * 4 * 4 / ranks, rel=0.01
    )


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.slow
def test_formulas_count_contention(formulas, ranks):
    """Compute is slower during communication, as in the numeric prediction, by at most the overlapped time."""
    profile = replace(H100, contention=0.5)
    inputs = (torch.zeros(*TOKENS.shape, dtype=torch.long),)
    symbolic = Study(meta_net(), inputs, None, OPTIONS, symbols=SYMBOLIC)
    found = symbolic.explain((8,), profile, "isolated").formulas.evaluate(ranks=ranks)
    expected = Study(meta_net(), inputs, None, OPTIONS).explain((ranks,), profile, "isolated")
    for name in SECONDS:
        assert found[name] == pytest.approx(getattr(expected, name), rel=1e-9), name
    alone = formulas.evaluate(ranks=ranks)
    slower = found["compute_s"] - alone["compute_s"]
    assert 0 < slower <= 0.5 * found["communication_s"]
    assert expected.lower_bound_s <= expected.step_time_s
    assert sum(r.calls * r.seconds for r in expected.regions) == pytest.approx(expected.compute_s)


@pytest.mark.parametrize("contention", [0.0, 0.5])
@pytest.mark.parametrize("mesh", [(8,), (4, 8)])
@pytest.mark.quick_cases("mesh1-0.0")
def test_formulas_match_the_timeline(mesh, contention):
    """With host copies, on one axis and on two, with contention: equal to the timeline's step up to rounding."""
    passes = graphshard.Pipeline().replace("plan", MakePlan(COALESCED)).insert(OffloadParameters(), before="plan")
    profile = replace(H100, contention=contention)
    inputs = (torch.zeros(*TOKENS.shape, dtype=torch.long),)
    study = Study(meta_net(width=64), inputs, None, replace(OPTIONS, passes=passes), symbols=SYMBOLIC)
    found = study.explain(mesh, profile, "isolated")
    assert found.formulas is not None
    assert {"upload", "download"} < {step.kind for step in found._timeline.steps}
    values = found.formulas.evaluate()
    for name in SECONDS:
        assert values[name] == pytest.approx(getattr(found, name), rel=1e-12), name


def test_formulas_count_a_passes_communication():
    """Eight bits per element and a scale per shard, as on the timeline, also for other numbers of ranks."""
    passes = graphshard.Pipeline().insert(Float8AllGather(("layers.*.weight",)), before="plan")
    options, inputs = replace(OPTIONS, passes=passes), (torch.zeros(*TOKENS.shape, dtype=torch.long),)
    found = Study(meta_net(), inputs, None, options, symbols=SYMBOLIC).explain((8,), H100, "isolated")
    assert found.formulas is not None
    for name in SECONDS:
        assert found.formulas.evaluate()[name] == pytest.approx(getattr(found, name), rel=1e-9), name
    more = Study(meta_net(), inputs, None, options).explain((16,), H100, "isolated")
    assert found.formulas.evaluate(ranks=16)["communication_s"] == pytest.approx(more.communication_s, rel=1e-9)


@pytest.mark.slow
def test_saved_bytes_are_memory(formulas):
    """Saved activations grow with tokens, and are part of the peak memory."""
    one, four = (formulas.evaluate(batch=n)["saved_bytes"] for n in (2, 8))
    assert 3.5 * one < four <= 4 * one
    big = explained(8, 128, 8)
    assert big.memory["saved for backward"] <= four


def test_smooth_formulas(formulas):
    """Without maxima: polynomials that approximate the numbers up to roundings."""
    for name in ("compute_s", "communication_s", "saved_bytes", "state_bytes"):
        smooth = formulas.smooth(name)
        assert not smooth.has(sympy.Max, sympy.Min, sympy.ceiling)
        at = {formulas.symbols[n]: v for n, v in formulas.at.items()}
        assert float(smooth.subs(at)) == pytest.approx(formulas.evaluate()[name], rel=0.15)
    assert formulas.smooth("compute_s").has(formulas.symbols["batch"])
    assert formulas.smooth("state_bytes").has(formulas.symbols["ranks"])


def test_crossover(formulas):
    """At the crossover batch communication is hidden, one below it is not; the formula agrees for any sequence."""
    found = formulas.crossover("batch")
    assert found is not None
    hidden, exposed = (formulas.evaluate(batch=found.value - n) for n in (0, 1))
    assert hidden["communication_s"] <= hidden["compute_s"]
    assert exposed["communication_s"] > exposed["compute_s"]
    at = {formulas.symbols[n]: v for n, v in formulas.at.items()}
    assert float(found.formula.subs(at)) == pytest.approx(found.value, rel=0.15)
    half = formulas.crossover("batch", seq=64)
    assert half is not None
    assert half.value == pytest.approx(2 * found.value, rel=0.1)
    assert formulas.symbols["batch"] not in found.formula.free_symbols


def test_formulas_are_printed():
    """The table shows growth and the crossover; JSON has all definitions."""
    found = explained(*TOKENS.shape, 8)
    assert "formulas around batch 2, seq 128, ranks 8:" in str(found)
    assert "communication_s <= compute_s from batch" in str(found)
    assert "step_time_s = " in found.to_dict()["formulas"]


def test_wrong_symbols(formulas):
    """The message names the symbol and the known ones."""
    with pytest.raises(ArgumentError, match="there is no symbol 'length'; there are batch, seq, ranks"):
        formulas.evaluate(length=3)
    with pytest.raises(ArgumentError, match="batch must be positive, got 0"):
        formulas.evaluate(batch=0)
    with pytest.raises(ArgumentError, match="not by 'ranks': vary one of batch, seq"):
        formulas.crossover("ranks")


class Other(nn.Module):
    """Behaves differently at other sizes, as `what` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "operators" and x.shape[0] > 10:
            x = x.relu()
        if self.what == "rounding":
            x = x[: x.shape[0] ** 2 // 40]
        return (x @ self.w).sum()


@pytest.mark.parametrize(
    ("what", "symbols", "message"),
    [
        ("operators", {"rows": 0}, r"the model computes something else at rows 8, from \w+ on"),
        ("rounding", {"rows": 0}, "which no polynomial that is linear in each symbol gives"),
        ("", {"rows": 5}, "no input has a dim 5 for 'rows'"),
        ("", {"rows": -1}, "symbols must name dims of the inputs"),
        ("", ["rows"], "symbols must name dims of the inputs"),
    ],
)
def test_models_without_formulas(what, symbols, message):
    """The message gives the reason."""
    with pytest.raises(ArgumentError, match=message):
        graphshard.explain(Other(what), (8,), example_inputs=(torch.ones(16, 4),), symbols=symbols)


def test_sizes_have_symbols():
    """Every size that grows with the input has its symbol; weights have none."""
    study = Study(Other(""), (torch.ones(16, 4),), None, symbols={"rows": 0})
    study.explain((8,), H100, "isolated")
    captured = study._targets[None].program
    assert captured is not None
    nodes = captured.phases["joint"].module.graph.nodes
    rows = sympy.Symbol("rows", integer=True, positive=True)
    found = {node.meta[SYMBOLS] for node in nodes if SYMBOLS in node.meta}
    assert found == {(rows, 4), (4, rows)}

"""`graphshard.profiling.profile_step` on real ranks: its measurements, and no lasting effect on the model."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard.errors import ArgumentError
from graphshard.profiling import StepProfile
from graphshard.runtime.step_recorder import HostClock, current_recording, recording
from tests.distributed.twins import assert_same, grads_of, params_of, world_mesh
from tests.helpers import Blocks
from tests.ranks import FakeWorld, Ranks


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.dropout(self.linear(self.norm(x)).relu(), 0.5, self.training)


class _Net(nn.Module):
    """A model with updated buffers, random numbers and two outputs."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits.square().mean(), logits


def _first(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0]


def _compiled(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    return graphshard.compile(_Net(), world_mesh(), backend=options.pop("backend", "eager"), **options)


def _batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def _step(model: nn.Module, x: Tensor) -> None:
    torch.manual_seed(5)
    model(x)[0].backward()


def _measured(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    model = _compiled(backend=backend)
    profile = graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    assert isinstance(profile, StepProfile)
    profile.save_trace(f"{folder}/{rank}.json")
    profile.save_report(f"{folder}/{rank}.html")
    assert 'id="fsdp2-summary"' in Path(f"{folder}/{rank}.html").read_text()
    assert "The dashed line is measured memory" in Path(f"{folder}/{rank}.html").read_text()
    (mine,) = (step for step in profile.ranks if step.rank == rank)
    assert len(mine.memory) > 10
    assert [share for share, _ in mine.memory] == sorted(share for share, _ in mine.memory)
    assert mine.peak_bytes == max(num_bytes for _, num_bytes in mine.memory)
    (program,) = graphshard.programs(model)
    assert program.plan is not None
    assert {t.name for t in profile.collectives} == {bucket.name for bucket in program.plan.buckets}
    assert {t.name for t in profile.waits} == {bucket.name for bucket in program.plan.buckets}
    assert {t.name for t in profile.regions} == set(program.region_names)
    assert sum(t.calls for t in profile.regions) == program.num_regions
    _check_times(profile, world_size)
    return {"text": str(profile), "ranks": [step.rank for step in profile.ranks], "title": program.title}


def _check_times(profile: StepProfile, world_size: int) -> None:
    """Check that every number is plausible."""
    sums = (profile.step, profile.compute, profile.exposed, profile.other)
    for timing in (*sums, *profile.regions, *profile.collectives, *profile.waits):
        assert timing.measured.least <= timing.measured.median <= timing.measured.most, timing
        assert (timing.predicted is None) == (timing.kind == "other"), timing
    assert all(timing.measured.least > 0 for timing in (profile.step, profile.compute, *profile.regions))
    assert len(profile.ranks) == world_size
    for step in profile.ranks:
        assert all(0 <= span.start <= span.end <= step.seconds for span in step.spans)
        compute = [span for span in step.spans if span.kind in ("compute", "exposed")]
        assert all(before.end <= after.start for before, after in itertools.pairwise(compute))
        assert step.total("compute", "exposed") < step.seconds
    for waited in profile.waits:
        (sent,) = (t for t in profile.collectives if t.name == waited.name and t.phase == waited.phase)
        assert waited.measured.most <= sent.measured.most, "a collective is under way while it is waited for"
    assert profile.memory is not None
    assert profile.memory.predicted
    assert 0.3 < profile.memory.measured.median / profile.memory.predicted < 3


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_a_step_is_measured(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    """Every region, collective and wait on all ranks; all ranks get the same profile."""
    first, second = ranks(2).run(_measured, backend, str(tmp_path))
    assert first["ranks"] == [0, 1]
    assert first["text"] == second["text"]
    assert "_Net on 2 ranks" in first["text"]
    assert "predicted for " in first["text"]
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()
    _check_trace(json.loads((tmp_path / "0.json").read_text())["traceEvents"])
    page = (tmp_path / "0.html").read_text()
    assert f"<title>{first['title']}, " in page
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["timeline"]["measured"]
    assert {span["lane"] for span in shown["spans"]} == {"compute", "communication"}
    assert all("all ranks, in a step: " in span["detail"] for span in shown["spans"])


def _check_trace(events: list[dict[str, Any]]) -> None:
    """Check for a process per rank and one for the prediction, with both lanes and without overlapping events."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.partition(" for ")[0] for name in processes.values()] == ["rank 0", "rank 1", "predicted"]
    for process in processes:
        mine = [e for e in events if e["pid"] == process]
        lanes = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert set(lanes.values()) == {"compute", "communication"}
        for track in lanes:
            found = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X" and e["tid"] == track)
            assert found
            assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(found))


def _predicted(rank: int, world_size: int) -> None:
    model = _compiled()
    profile = graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    found = graphshard.explain(
        _Net(), (world_size,), example_inputs=(_batch(),), backend="eager", hardware="cpu-gloo", optimizer_states=0
    )
    assert profile.step.predicted == pytest.approx(found.step_time_s - found.optimizer_s)
    assert profile.compute.predicted == pytest.approx(found.compute_s)
    assert profile.exposed.predicted == pytest.approx(found.exposed_comm_s)
    assert profile.head.predicted == pytest.approx(found.head_s)
    assert profile.tail.predicted == pytest.approx(found.tail_s)
    for step in profile.ranks:
        waited = sorted((span for span in step.spans if span.kind == "exposed"), key=lambda span: span.start)
        # The head is one bucket here; the last ones of the tail have only casts between them.
        assert profile.head.measured.least <= waited[0].seconds <= profile.head.measured.most
        sums = list(itertools.accumulate(span.seconds for span in reversed(waited)))
        tail = profile.tail.measured
        assert any(tail.least * 0.999 <= seconds <= tail.most * 1.001 for seconds in sums), (tail, sums)
    assert profile.memory
    assert profile.memory.predicted == found.peak_memory_bytes
    slower = graphshard.profiling.profile_step(model, (_batch(),), loss=_first, hardware="a100")
    assert slower.hardware != profile.hardware
    assert slower.step.predicted != profile.step.predicted


@pytest.mark.slow
def test_the_prediction_equals_explain(ranks: Ranks) -> None:
    """Although the running graphs are bound to process groups, with collectives rewritten for gloo."""
    ranks(2).run(_predicted)


def _state(model: nn.Module, x: Tensor) -> dict[str, Any]:
    local = {name: param.to_local().clone() for name, param in model.named_parameters()}
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    grads = {f"gradient {name}": param.grad.to_local().clone() for name, param in model.named_parameters()}
    drawn = {"random": torch.get_rng_state(), "python": random.getstate()[1][0], "input": x.clone(), "grad": x.grad}
    return local | buffers | grads | drawn


def _left(rank: int, world_size: int) -> None:
    """`profile_step` restores all state; the next step equals an unmeasured twin's."""
    model, twin = _compiled(), _compiled()
    x = _batch().requires_grad_()
    model.get_parameter("head.weight").register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    hook = model.get_parameter("head.weight")._post_accumulate_grad_hooks
    _step(twin, _batch())
    hook.clear()
    _step(model, _batch())
    model.get_parameter("head.weight").register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    before, gradients = _state(model, x), grads_of(model)
    graphshard.profiling.profile_step(model, (x,), loss=_first)
    assert all(param.grad is gradients[name] for name, param in model.named_parameters())
    assert_same(before, _state(model, x), "measured")
    assert current_recording() is None
    hook.clear()
    for net in (model, twin):
        _step(net, _batch())
    assert_same(grads_of(model), grads_of(twin), "the next step")
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), "its buffers")


@pytest.mark.slow
def test_profiling_has_no_lasting_effect(ranks: Ranks) -> None:
    ranks(2).run(_left)


def _recorded(rank: int, world_size: int, backend: str) -> None:
    model, twin = (_compiled(backend=backend) for _ in range(2))
    _step(twin, _batch())
    with recording(HostClock()) as record:
        _step(model, _batch())
    assert [run.name for run in record.runs] == ["forward", "backward"]
    assert_same(grads_of(model), grads_of(twin), "recorded")
    count = len(record.runs)
    _step(model, _batch())
    assert len(record.runs) == count


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_recorded_code_has_the_same_gradients(ranks: Ranks, backend: str) -> None:
    """Bit for bit; nothing is recorded after the block."""
    ranks(2).run(_recorded, backend)


def _accumulating(rank: int, world_size: int) -> None:
    """Profile between two microbatches, with accumulated gradients."""
    model, twin = _compiled(), _compiled()
    for net in (model, twin):
        net.set_requires_gradient_sync(False)
        _step(net, _batch())
    profile = graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    assert {t.kind for t in profile.collectives} == {"gather"}, "this backward adds up gradients, and reduces none"
    assert profile.step.predicted
    assert all(timing.predicted for timing in (*profile.regions, *profile.collectives))
    for net in (model, twin):
        net.set_requires_gradient_sync(True)
        _step(net, _batch())
    assert_same(grads_of(model), grads_of(twin), "microbatches")


@pytest.mark.slow
def test_between_microbatches(ranks: Ranks) -> None:
    ranks(2).run(_accumulating)


def _forward_alone(rank: int, world_size: int) -> None:
    model = _compiled().eval()
    with torch.no_grad():
        profile = graphshard.profiling.profile_step(model, (_batch(),))
    assert {timing.phase for timing in profile.regions} == {"forward"}
    assert profile.step.predicted


def test_without_gradients_a_forward_is_measured(ranks: Ranks) -> None:
    ranks(2).run(_forward_alone)


class _Parts(nn.Module):
    """A model whose loss calls a unit directly."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).relu()


def _several(rank: int, world_size: int, folder: str) -> None:
    model = graphshard.compile(_Parts(), world_mesh(), units=["body", "head"], backend="eager")
    profile = graphshard.profiling.profile_step(model, (_batch(),), loss=lambda out: model.head(out).sum())
    titles = list(dict.fromkeys(timing.program for timing in profile.regions))
    assert len(titles) == 2
    assert profile.step.predicted
    with pytest.raises(ArgumentError, match=r"^program: the step ran .*_Parts-0.*\. Give one of these\."):
        profile.save_report(f"{folder}/{rank}.html")
    with pytest.raises(ArgumentError, match=r"^program must be one of .*, got 'nope'\."):
        profile.save_report(f"{folder}/{rank}.html", "nope")
    for title in titles:
        profile.save_report(f"{folder}/{rank}.html", title)
        assert title in Path(f"{folder}/{rank}.html").read_text()


def test_units_called_directly(ranks: Ranks, tmp_path: Path) -> None:
    """Several programs run; a report covers one of them."""
    ranks(2).run(_several, str(tmp_path))


def _refused(rank: int, world_size: int) -> None:
    model = _compiled()
    with pytest.raises(ArgumentError, match=r"^loss: _Net returned .*Give loss=, such as lambda output: output\.loss"):
        graphshard.profiling.profile_step(model, (_batch(),))
    with pytest.raises(ArgumentError, match=r"^loss: loss returned a Tensor of shape \[6, 5\], and backward starts"):
        graphshard.profiling.profile_step(model, (_batch(),), loss=lambda output: output[1])
    assert current_recording() is None
    model.unshard()
    with pytest.raises(ArgumentError, match=r"gathered by hand .*Call model\.reshard\(\) first"):
        graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    model.reshard()
    graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    assert_same(params_of(model), params_of(_compiled()), "parameters")


def test_rejects_what_cannot_be_measured(ranks: Ranks) -> None:
    ranks(2).run(_refused)


def _watched(rank: int, world_size: int) -> None:
    """Use the user's profiler on one rank: memory is not measured, and no rank hangs."""
    model = _compiled()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if rank == 0:
        with torch.profiler.profile(activities=activities):
            profile = graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    else:
        profile = graphshard.profiling.profile_step(model, (_batch(),), loss=_first)
    assert profile.memory is None
    assert "peak memory" not in str(profile)


def test_while_another_profiler_runs(ranks: Ranks) -> None:
    ranks(2).run(_watched)


def test_one_rank_of_a_fake_world(fake_world: FakeWorld) -> None:
    """With a fake process group one rank is measured, without communication."""
    fake_world(8)
    model = graphshard.compile(Blocks(3, 16), world_mesh(), backend="eager")
    profile = graphshard.profiling.profile_step(model, (torch.randn(2, 16),))
    assert [step.rank for step in profile.ranks] == [0]
    assert len(profile.regions) > 2
    assert profile.step.measured.median > 0

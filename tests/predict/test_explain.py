"""explain: predicted steps of models on the meta device, for meshes and machines that do not exist."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.cost.costs import Costs
from graphshard.debug.html_report import report_of
from graphshard.errors import ArgumentError
from graphshard.options.options import Options
from graphshard.passes import MakePlan, OffloadParameters
from graphshard.predict.step_prediction import advise, critical_parts, limit_of
from graphshard.predict.study import Study
from graphshard.schedule.clock import Launch, TimedCall, TimedWait, run
from graphshard.schedule.fsdp2_order import PlanByUnit
from graphshard.schedule.planner import PlanByCost
from graphshard.schedule.timeline import ends_of, steps_of
from graphshard.utils.text import format_bytes, format_seconds

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """An embedding, four wide blocks and a head."""

    def __init__(self, width: int = 512, depth: int = 4, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).float().logsumexp(-1).mean()


def meta_net(**sizes: int) -> Net:
    """Build the net on the meta device, like a model that does not fit."""
    with torch.device("meta"):
        return Net(**sizes)


TOKENS = torch.zeros(2, 128, dtype=torch.long)
RANKS = 8
# Without contention, so that changed lengths affect a step only through the graph's edges.
H100 = dataclasses.replace(graphshard.profiling.load_profile("h100"), contention=0.0)


@pytest.fixture(scope="module")
def study() -> Study:
    """Capture once for many tests."""
    return Study(meta_net(), (TOKENS,), None, Options(mp_policy=BF16))


@pytest.fixture(scope="module")
def found(study):
    """Explain on 8 H100."""
    return study.explain((RANKS,), H100, "isolated")


def test_no_process_group_and_no_memory():
    """The model stays on meta, uncompiled, and torch.distributed is not initialized."""
    model = meta_net()
    before = dict(model.named_parameters())
    result = graphshard.explain(model, {"shard": 64}, example_inputs=(TOKENS,))
    assert not dist.is_initialized()
    assert type(model) is Net
    assert dict(model.named_parameters()) == before
    assert all(param.is_meta for param in model.parameters())
    assert result.mesh == {"shard": 64}
    assert result.tokens == 256
    assert result.hardware == "h100"


def test_parts_add_up_to_the_step(found):
    """The parts add up to the step, and the bound is not above it."""
    parts = found.compute_s + found.exposed_comm_s + found.optimizer_s
    assert found.step_time_s == pytest.approx(parts)
    assert 0 < found.lower_bound_s <= found.step_time_s * (1 + 1e-9)
    assert found.gap == pytest.approx(found.step_time_s / found.lower_bound_s - 1)
    assert found.tokens_per_second == pytest.approx(256 * RANKS / found.step_time_s)
    assert found.exposed_comm_s == pytest.approx(sum(wait.seconds for wait in found.waits))
    assert found.busy["compute"] == pytest.approx(found.compute_s / found.step_time_s)
    assert found.busy["node"] == pytest.approx(found.communication_s / found.step_time_s)
    assert found.compute_s == pytest.approx(sum(r.calls * r.seconds for r in found.regions))
    assert found.peak_memory_bytes == sum(found.memory.values())
    assert found.communication_s >= found.exposed_comm_s
    ends = {(wait.phase, wait.why): wait.seconds for wait in found.waits}
    assert found.head_s >= ends["forward", "head"] * (1 - 1e-9)
    assert found.tail_s >= ends["backward", "tail"] * (1 - 1e-9)
    assert f"head {format_seconds(found.head_s)}, tail {format_seconds(found.tail_s)}" in str(found)


def test_ends_of_a_step():
    """Casts before, between and after the collectives at an end do not end it; other waits are not ends."""
    order = [("cast", 1.0), ("gather", 2.0), ("gather", 3.0), ("compute", 4.0), ("gather", 5.0), ("compute", 6.0)]
    assert ends_of(order) == (5.0, 0.0)  # a forward alone reduces nothing
    reduced = [("reduce", 7.0), ("cast", 1.0), ("all_reduce", 8.0), ("cast", 9.0)]
    assert ends_of([*order, *reduced]) == (5.0, 15.0)
    assert ends_of([]) == ends_of([("compute", 1.0)]) == (0.0, 0.0)


def test_reports_a_search_stopped_by_its_budget(found):
    """Next to the remaining gap."""
    planner = PlanByCost(Costs(graphshard.profiling.load_profile("h100")), steps=0)
    passes = graphshard.Pipeline().replace("plan", MakePlan(planner))
    stopped = graphshard.explain(meta_net(), {"shard": 64}, example_inputs=(TOKENS,), passes=passes)
    assert stopped.search_stopped
    assert f"gap {stopped.gap:.1%}, as the search for a shorter plan ended at its budget" in str(stopped)
    assert stopped.to_dict()["search_stopped"]
    assert not found.search_stopped
    assert "ended at its budget" not in str(found)


def test_flops_and_mfu(found):
    """Six per parameter and token for the layers' weights, at the peak rate of bfloat16."""
    weights = 4 * 2 * 4 * 512**2 + 512 * 1024
    assert found.flop == 6 * weights * 256
    peak = graphshard.profiling.load_profile("h100").rate("bfloat16").peak
    assert found.mfu == pytest.approx(found.flop / peak / found.step_time_s)


@pytest.mark.slow
def test_state_is_sharded(study, found):
    """Twice the ranks halve the sharded parameters and optimizer state of a rank."""
    trained = sum(p.numel() for p in study.model.parameters()) * 4
    assert found.memory["optimizer state"] == pytest.approx(2 * trained / RANKS, rel=0.01)
    twice = study.explain((2 * RANKS,), graphshard.profiling.load_profile("h100"), "isolated")
    assert twice.memory["optimizer state"] == pytest.approx(found.memory["optimizer state"] / 2, rel=0.01)
    plain = graphshard.explain(study.model, (RANKS,), example_inputs=(TOKENS,), mp_policy=BF16, optimizer_states=0)
    assert plain.memory["optimizer state"] == 0
    assert plain.optimizer_s == pytest.approx(found.optimizer_s * 3 / 7)


def test_table(found):
    """The table for users."""
    text = str(found)
    for part in ("Net, 256 tokens per rank", "shard 8", "network isolated", "tokens/s", "MFU"):
        assert part in text
    assert f"limited by     {found.limit}" in text
    assert all(f"* {line}" in text for line in found.advice)


def test_waits_have_reasons(study, found):
    """The first gather and the last reduction overlap nothing; on a slow network buckets queue."""
    of_bucket = {wait.bucket: wait for wait in found.waits}
    gathers, reductions = ([s.name for s in found._timeline.steps if s.kind == kind] for kind in ("gather", "reduce"))
    assert of_bucket[gathers[0]].why == "head"
    assert of_bucket[reductions[-1]].why == "tail"
    assert [wait.seconds for wait in found.waits] == sorted((w.seconds for w in found.waits), reverse=True)
    slow = study.explain((64,), graphshard.profiling.load_profile("a100"), "in-training")
    queued = [wait for wait in slow.waits if wait.why == "link"]
    assert queued
    assert all(wait.behind and wait.behind != wait.bucket for wait in queued)
    assert slow.busy.keys() == {"compute", "network"}
    assert f"longest waits  {slow.waits[0]}" in str(slow)
    assert f"link between nodes {slow.busy['network']:.1%}" in str(slow)


def test_critical_path_and_slack(study, found):
    """The critical path is as long as forward and backward; table and report list its parts and each slack."""
    assert sum(found.critical_path.values()) == pytest.approx(found.step_time_s - found.optimizer_s)
    path = [name for name in found.critical_path if name != "compute"]
    assert set(path) <= found.slack.keys() == {bucket.name for bucket in found._program.plan.buckets}
    assert all(found.slack[name] == 0 for name in path)
    loose = [name for name, seconds in found.slack.items() if seconds]
    assert loose
    text = str(found)
    assert f"compute {found.critical_path['compute'] / (found.step_time_s - found.optimizer_s):.1%}, " in text
    assert f"none for {len(found.slack) - len(loose)} of {len(found.slack)} buckets, " in text
    assert json.loads(found.to_json())["slack"] == found.slack
    # Simulate again with longer events: within their slack, and beyond.
    timeline = found._timeline
    (event,) = (s.event for s in timeline.steps if s.name == loose[0] and s.link)
    for more, expected in ((0.5, 0.0), (2.0, 1.0)):
        launch = timeline.events[event]
        longer = dataclasses.replace(launch, seconds=launch.seconds + more * found.slack[loose[0]])
        events = [*timeline.events[:event], longer, *timeline.events[event + 1 :]]
        step = run(events, 0.0).step(events)
        assert step - timeline.seconds == pytest.approx(expected * found.slack[loose[0]], abs=1e-12)
    alone = study.explain((1,), H100, "isolated")
    assert list(alone.critical_path) == ["compute"]


@pytest.mark.slow
def test_waits_name_their_causes(study):
    """A wait, also in the report's tooltip, says how much shorter it would be without each cause."""
    slow = study.explain((8, 8), graphshard.profiling.load_profile("h100"), "isolated")
    wait = next(wait for wait in slow.waits if len(wait.without) > 1)
    other, seconds = next((name, seconds) for name, seconds in wait.without.items() if name != wait.bucket)
    assert 0 < seconds <= wait.seconds
    assert f"{format_seconds(seconds)} less without {other})" in str(wait)
    assert list(wait.without.values()) == sorted(wait.without.values(), reverse=True)
    report = report_of(slow._program, costs=slow._costs)
    details = [span.detail for span in report.timeline.spans if span.kind == "exposed" and span.name == wait.bucket]
    assert any(f"{format_seconds(seconds)} less without {other}" in detail for detail in details)


def test_parameters_on_the_host(found, tmp_path):
    """Copies to and from the host use a separate link; a gather starts when its shard has arrived."""
    passes = graphshard.Pipeline().insert(OffloadParameters(), before="plan")
    away = graphshard.explain(
        meta_net(), (RANKS,), example_inputs=(TOKENS,), mp_policy=BF16, hardware="h100", passes=passes
    )
    steps = away._timeline.steps
    arrived = {step.name.removeprefix("upload "): step.end for step in steps if step.kind == "upload"}
    trained = sum(p.numel() for p in meta_net().parameters()) * 4
    uploads = [step for step in steps if step.kind == "upload" and step.phase == "forward"]
    assert sum(step.num_bytes for step in uploads) == pytest.approx(trained / RANKS, rel=0.01)
    assert sum(s.num_bytes for s in steps if s.kind == "download") == pytest.approx(trained / RANKS, rel=0.01)
    gather = next(step for step in steps if step.kind == "gather")
    bucket = away._program.plan.bucket(gather.name)
    assert all(arrived[name] <= gather.start for name in bucket.members if name in arrived)
    for kind, link in {"upload": "host", "download": "to_host"}.items():  # both directions at once
        on_link = sorted((s.start, s.end) for s in steps if s.link == link)
        assert len(on_link) == sum(step.kind == kind for step in steps) > 1
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(on_link))
        assert 0 < away.busy[link] < 1
    assert "link from the host" in str(away)
    assert "link to the host" in str(away)
    assert away.memory["optimizer state"] == 0 < found.memory["optimizer state"]
    assert away.memory.get("shards", 0) < found.memory["shards"]
    assert away.exposed_comm_s > found.exposed_comm_s
    away.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {e["args"].get("name") for e in events if e["ph"] == "M"}
    assert {"copies from the host", "copies to the host", "communication"} <= tracks
    away.save_html(tmp_path / "r.html")
    assert "upload embed.weight" in (tmp_path / "r.html").read_text()


def test_two_axes(study, tmp_path):
    """Gathers stay in the node while all-reduces cross nodes: two links that run concurrently."""
    found = study.explain((8, 8), graphshard.profiling.load_profile("h100"), "isolated")
    assert (found.mesh, found.num_ranks) == ({"replicate": 8, "shard": 8}, 64)
    links = {(s.kind, s.link) for s in found._timeline.steps if s.link}
    assert links == {("gather", "node"), ("reduce", "node"), ("all_reduce", "network")}
    assert found.busy.keys() == {"compute", "node", "network"}
    assert found.communication_s == pytest.approx(sum(s.seconds for s in found._timeline.steps if s.link))
    assert found.compute_s + found.exposed_comm_s + found.optimizer_s == pytest.approx(found.step_time_s)
    assert found.lower_bound_s <= found.step_time_s
    together = [
        (a, b)
        for a, b in itertools.product(found._timeline.steps, repeat=2)
        if (a.link, b.link) == ("node", "network") and max(a.start, b.start) < min(a.end, b.end)
    ]
    assert together
    # All-reduces are launched one by one, and waited for at the end.
    events = [e for e in found._program.plan.events["backward"] if e.bucket.startswith("all_reduce")]
    assert [e.action for e in events] == ["start"] * (len(events) // 2) + ["wait"] * (len(events) // 2)
    found.save_trace(tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {1, 2, 3}
    found.save_html(tmp_path / "x.html")
    assert "all_reduce" in (tmp_path / "x.html").read_text()


@pytest.mark.slow
def test_formulas_on_two_axes():
    """They equal explain, also for another number of shards, if the number of replicas stays."""
    study = Study(meta_net(width=64), (TOKENS,), None, Options(mp_policy=BF16), symbols={"batch": 0})
    h100 = graphshard.profiling.load_profile("h100")
    found, more = (study.explain((4, ranks), h100, "isolated") for ranks in (4, 8))
    for name, value in (("step_time_s", more.step_time_s), ("communication_s", more.communication_s)):
        assert found.formulas.evaluate(batch=2)[name] == pytest.approx(getattr(found, name))
        assert found.formulas.evaluate(batch=2, ranks=8)[name] == pytest.approx(value, rel=0.05)
    assert "formulas around" in str(found)


@pytest.mark.slow
def test_two_axes_are_planned_as_compile_plans_them(fake_world):
    from torch.distributed.device_mesh import init_device_mesh

    predicted = graphshard.explain(meta_net(), (2, 2), example_inputs=(TOKENS,), hardware="cpu-gloo")
    fake_world(4)
    model = Net()
    graphshard.compile(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), backend="eager")
    model(TOKENS)
    (program,) = graphshard.programs(model)
    assert program.plan.hash == predicted.plan_hash
    assert program.regions.keys() == {region.key for region in predicted.regions}


def test_json(found):
    """Plain numbers; private fields are left out."""
    data = json.loads(found.to_json())
    assert data["step_time_s"] == found.step_time_s
    assert data["tokens_per_second"] == found.tokens_per_second
    assert data["regions"][0]["key"] == found.regions[0].key
    assert not any(name.startswith("_") for name in data)


def test_html(found, tmp_path):
    """The report of the same program, for the same machine."""
    found.save_html(tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "NVIDIA H100 SXM" in text
    assert found.profile_hash[:12] not in text, "a headline has no hashes"
    for number in (format_bytes(found.peak_memory_bytes), format_seconds(found.step_time_s), f"{found.mfu:.1%}"):
        assert number in text
        assert number in str(found)
    assert found._inside.whole_memory.peak_bytes == found.peak_memory_bytes, "of the curve, too"
    assert "The plan is" in text, "compared with FSDP2's order"
    assert "gather layers.1 in forward" in text


def test_trace(found, tmp_path):
    """Valid trace events: known phases with their fields, and no overlap on a track."""
    found.save_trace(tmp_path / "x.json")
    trace = json.loads((tmp_path / "x.json").read_text())
    fields = {"X": {"ts", "dur", "tid", "cat"}, "C": {"ts", "args"}, "M": {"args"}}
    fields |= {arrow: {"ts", "tid", "id"} for arrow in "sf"}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid"} | fields[event["ph"]] <= event.keys()
    tracks: dict[int, list] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault(event["tid"], []).append(event)
    assert tracks.keys() == {1, 2}
    for events in tracks.values():
        for a, b in itertools.pairwise(events):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    waits = sum(e["dur"] for e in tracks[1] if e["cat"] == "exposed")
    assert waits == pytest.approx(found.exposed_comm_s * 1e6)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {"compute", "communication"} <= names
    peak = max(e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "memory")
    assert peak == found.peak_memory_bytes
    arrows = {kind: [e for e in trace["traceEvents"] if e["ph"] == kind] for kind in "sf"}
    assert [e["id"] for e in arrows["s"]] == [e["id"] for e in arrows["f"]] == list(range(len(found.waits)))
    assert all(start["ts"] <= end["ts"] + 1e-6 for start, end in zip(arrows["s"], arrows["f"]))
    assert {e["tid"] for e in arrows["f"]} == {1}, "an arrow ends at the wait on the lane of compute"


@pytest.mark.slow
def test_plan_and_regions_equal_compile(fake_world):
    """`compile` makes the same plan and regions with the same arguments."""
    from torch.distributed.device_mesh import init_device_mesh

    cpu = dataclasses.replace(graphshard.profiling.load_profile("h100"), name="cpu", device="cpu")
    predicted = graphshard.explain(meta_net(), (4,), example_inputs=(TOKENS,), hardware=cpu)
    fake_world(4)
    model = Net()
    graphshard.compile(model, init_device_mesh("cpu", (4,)), backend="eager", hardware=cpu)
    model(TOKENS)
    (program,) = graphshard.programs(model)
    assert program.plan.hash == predicted.plan_hash
    assert program.regions.keys() == {region.key for region in predicted.regions}


# Limits and advice


def test_limits(study):
    """A slow network gives "link", much work for few bytes "compute", too little memory "memory"."""
    h100 = graphshard.profiling.load_profile("h100")
    assert study.explain((1024,), h100, "in-training").limit == "link"
    slow = dataclasses.replace(
        h100, rates={n: dataclasses.replace(r, peak=r.peak / 1e4) for n, r in h100.rates.items()}
    )
    assert study.explain((RANKS,), slow, "isolated").limit == "compute"
    small = study.explain((RANKS,), dataclasses.replace(h100, memory_capacity=1e6), "isolated")
    assert small.limit == "memory"
    assert "are needed" in small.advice[0]
    assert study.explain((RANKS,), h100, "isolated").limit in ("head", "tail", "link")


def test_limit_is_the_longest_part_of_the_critical_path(study):
    """Slower links become the head, the tail or the link; each part of the path is one of them or compute."""
    h100 = graphshard.profiling.load_profile("h100")
    for mesh, network in (((RANKS,), "isolated"), ((64,), "in-training"), ((8, 8), "isolated")):
        found = study.explain(mesh, h100, network)
        parts = critical_parts(found._timeline)
        seconds = {name: sum(s.seconds for s in parts[name]) for name in ("compute", "head", "tail", "link")}
        assert sum(seconds.values()) == pytest.approx(found._timeline.seconds)
        assert seconds["compute"] == pytest.approx(found.critical_path["compute"])
        assert found.limit == max(("head", "tail", "link"), key=lambda name: seconds[name])


def test_gain_of_the_advice(study):
    """Simulate again without the gathers of backward, and with half the reduction time."""
    found = study.explain((64,), H100, "in-training")
    events = found._timeline.events
    for text, factor, phases, kind in (
        ("reshard_after_forward=False", 0.0, ("backward",), "gather"),
        ("halves the reductions", 0.5, ("forward", "backward"), "reduce"),
    ):
        (line,) = (line for line in found.advice if text in line)
        other = [
            dataclasses.replace(e, seconds=factor * e.seconds)
            if isinstance(e, Launch) and (e.kind, e.phase in phases) == (kind, True)
            else e
            for e in events
        ]
        gain = found._timeline.seconds - run(other, 0.0).step(other)
        assert f"the step would be {format_seconds(gain)} shorter" in line


def test_a_slow_bucket_is_named(study):
    """One long reduction on an otherwise idle link: the advice names it and its cost."""
    found = study.explain((RANKS,), graphshard.profiling.load_profile("h100"), "isolated")
    calls = [event for event in found._timeline.events if isinstance(event, TimedCall)]
    slow = next(e for e in found._timeline.events if isinstance(e, Launch) and e.kind == "reduce")
    slow, long = dataclasses.replace(slow, seconds=1.0), dataclasses.replace(calls[0], seconds=3.0)
    for events, limit in (
        ([calls[0], slow, calls[1], TimedWait(slow.name, slow.phase, 1, None, 1), long], "link"),
        ([long, slow, TimedWait(slow.name, slow.phase, 1, None, 1)], "tail"),
        ([slow, TimedWait(slow.name, slow.phase, 1, None, 0), long], "head"),
    ):
        times = run(events, 0.0)
        phases = {"forward": (0.0, times.step(events))}
        timeline = dataclasses.replace(
            found._timeline, events=events, times=times, phases=phases, steps=list(steps_of(events, times))
        )
        assert limit_of(timeline) == limit
        about = {"limit": limit, "tokens": 1, "flop": {"bfloat16": 1.0}, "memory": {}}
        (line,) = (line for line in advise(found._program, found._costs, timeline, **about) if slow.name in line)
        gain = times.step(events) - sum(e.seconds for e in events if isinstance(e, TimedCall))
        assert f"the step would be {format_seconds(gain)} shorter without it" in line


@pytest.mark.parametrize(("compute", "limit"), [(24.0, "compute"), (8.0, "tail")])
def test_compute_limit_and_advice(study, compute: float, limit: str):
    """96 % of compute next to one reduction, and 89 %: the advice names the reduction in both cases."""
    found = study.explain((RANKS,), graphshard.profiling.load_profile("h100"), "isolated")
    call = next(event for event in found._timeline.events if isinstance(event, TimedCall))
    slow = next(e for e in found._timeline.events if isinstance(e, Launch) and e.kind == "reduce")
    slow, long = dataclasses.replace(slow, seconds=1.0), dataclasses.replace(call, seconds=compute)
    events = [long, slow, TimedWait(slow.name, slow.phase, 1, None, 1)]
    times = run(events, 0.0)
    phases = {"forward": (0.0, times.step(events))}
    timeline = dataclasses.replace(
        found._timeline, events=events, times=times, phases=phases, steps=list(steps_of(events, times)), compute=compute
    )
    assert limit_of(timeline) == limit
    about = {"limit": limit, "tokens": 1, "flop": {"bfloat16": 1.0}, "memory": {}}
    advice = list(advise(found._program, found._costs, timeline, **about))
    assert advice[-1].startswith(f"the tail is {slow.name}")
    if limit == "compute":
        assert advice[0] == "compute is 96.0% of the critical path; faster kernels help most"


@pytest.mark.slow
def test_advice_is_right(study):
    """With slightly more tokens than advised, communication is hidden; with a quarter it is not."""
    h100 = graphshard.profiling.load_profile("h100")
    # The planner would pack buckets where latency counts, which changes the communication in the advice.
    by_unit = {"mp_policy": BF16, "passes": graphshard.Pipeline().replace("plan", MakePlan(PlanByUnit()))}
    link = Study(study.model, (TOKENS,), None, Options(**by_unit)).explain((1024,), h100, "in-training")
    (line,) = [line for line in link.advice if "tokens per rank" in line]
    tokens = int(line.split("from about ")[1].split(" tokens")[0].replace(",", ""))
    speed = h100.rate("bfloat16").peak * h100.sustained
    assert tokens == pytest.approx(link.communication_s / (link.flop / 256 / speed), rel=0.01)
    assert any("reshard_after_forward=False drops the gathers of backward" in line for line in link.advice)
    assert any("halves R" in line for line in link.advice)

    def at(count: int) -> graphshard.Explanation:
        inputs = (torch.zeros(1, count, dtype=torch.long),)
        return graphshard.explain(study.model, (1024,), example_inputs=inputs, network="in-training", **by_unit)

    enough, few = at(tokens), at(tokens // 4)
    assert enough.communication_s < 1.01 * enough.compute_s
    assert few.communication_s > few.compute_s


@pytest.mark.slow
def test_advice_to_keep_parameters(study):
    """No gathers in backward: communication shrinks by A'."""
    h100 = graphshard.profiling.load_profile("h100")
    again = study.explain((64,), h100, "isolated")
    kept = graphshard.explain(study.model, (64,), example_inputs=(TOKENS,), mp_policy=BF16, reshard_after_forward=False)
    gathers = [step for step in again._timeline.steps if step.kind == "gather" and step.phase == "backward"]
    assert kept.communication_s == pytest.approx(again.communication_s - sum(s.seconds for s in gathers))


# Measured regions


def test_measured_regions_replace_estimates(study, found):
    """One region is measured as a second; the others keep their estimates."""
    region = found.regions[0]
    result = study.explain((RANKS,), H100, "isolated", measured={region.key: 1.0})
    assert result.compute_s == pytest.approx(found.compute_s + region.calls * (1.0 - region.seconds))
    assert [r.key for r in result.regions if r.measured] == [region.key]


@pytest.mark.slow
def test_measure_regions(fake_world, tmp_path):
    """Regions of a compiled model are timed, saved, and matched to the prediction by key."""
    from torch.distributed.device_mesh import init_device_mesh

    fake_world(2)
    model = Net(width=16, vocab=32)
    with pytest.raises(ArgumentError, match="Net has no program to measure"):
        graphshard.profiling.measure_regions(model)
    graphshard.compile(model, init_device_mesh("cpu", (2,)), backend="eager")
    with pytest.raises(ArgumentError, match="Net has no program to measure"):
        graphshard.profiling.measure_regions(model)
    model(TOKENS)
    measured = graphshard.profiling.measure_regions(model, budget=0.001)
    (program,) = graphshard.programs(model)
    assert measured.keys() == program.regions.keys()
    assert all(0 < seconds < 10 for seconds in measured.values())
    graphshard.profiling.save_measured(measured, tmp_path / "m.json")
    assert graphshard.profiling.load_measured(tmp_path / "m.json") == measured
    cpu = dataclasses.replace(graphshard.profiling.load_profile("h100"), name="cpu", device="cpu")
    small = meta_net(width=16, vocab=32)
    result = graphshard.explain(small, (2,), example_inputs=(TOKENS,), hardware=cpu, measured=measured)
    assert all(region.measured for region in result.regions)
    assert result.compute_s == pytest.approx(sum(measured[key] for key in program.region_calls))


def test_rejects_other_measurements(study, tmp_path):
    """An unknown region key, and a file without measurements."""
    with pytest.raises(ArgumentError, match="measured has 'abc', which is no region of this program"):
        study.explain((RANKS,), graphshard.profiling.load_profile("h100"), "isolated", measured={"abc": 1.0})
    (tmp_path / "m.json").write_text('{"abc": "fast"}')
    with pytest.raises(ArgumentError, match="holds no measured regions, seconds by region key"):
        graphshard.profiling.load_measured(tmp_path / "m.json")


# Grids


def test_grid(study):
    """One capture for all meshes and machines; a line for each; the best one fits into memory."""
    said = []
    grid = graphshard.explain_grid(
        study.model,
        [(8,), {"shard": 64}],
        example_inputs=(TOKENS,),
        hardware=["h100", "a100"],
        network=["isolated", "in-training"],
        settings={"f32": {}, "bf16": {"mp_policy": BF16}},
        show=said.append,
        workers=1,
    )
    assert len(grid.rows) == 2 * 2 * 2 * 2
    assert [text for text in said if text.endswith("capture")] == ["f32: capture", "bf16: capture"]
    assert [text for text in said if "bucket" in text] == [
        *("f32, 8 ranks: bucket", "f32, 64 ranks: bucket"),
        *("bf16, 8 ranks: bucket", "bf16, 64 ranks: bucket"),
    ]
    assert said.count("bf16, 64 ranks, a100: plan") == said.count("bf16, 64 ranks, a100: predict") == 2
    assert [row.label for row in grid.rows[:1] + grid.rows[-1:]] == ["f32", "bf16"]
    assert grid.best.tokens_per_second == max(row.tokens_per_second for row in grid.rows)
    lines = str(grid).splitlines()
    assert len(lines) == 17
    assert lines[0].split()[:4] == ["setting", "mesh", "hardware", "network"]
    assert [row["hardware"] for row in json.loads(grid.to_json())] == [row.hardware for row in grid.rows]
    single = study.explain((64,), graphshard.profiling.load_profile("a100"), "in-training")
    assert grid.rows[-1].step_time_s == pytest.approx(single.step_time_s)


@pytest.mark.slow
def test_settings_of_a_grid_share_a_capture():
    """Settings with equal captures share one, with the numbers of a separate capture."""
    said = []
    settings = {"reshard": {}, "keep": {"reshard_after_forward": False}, "full": {"activation": "full"}}
    model = meta_net()
    grid = graphshard.explain_grid(model, [(8,)], example_inputs=(TOKENS,), settings=settings, show=said.append)
    assert [text for text in said if text.endswith("capture")] == ["reshard: capture"]
    for row, setting in zip(grid.rows, settings.values()):
        alone = graphshard.explain(model, (8,), example_inputs=(TOKENS,), **setting)
        assert (row.step_time_s, row.memory) == (alone.step_time_s, alone.memory)


def test_settings_of_a_grid_that_are_equal_or_name_parameters():
    """Each has a row; parameters are compared by identity."""
    model = meta_net(width=16)
    ignored = {name: {"ignored_params": [getattr(model, name).weight]} for name in ("embed", "head")}
    settings = {"one": {}, "the same": {}, **ignored}
    grid = graphshard.explain_grid(model, [(8,)], example_inputs=(TOKENS,), settings=settings)
    assert [row.label for row in grid.rows] == list(settings)
    one, same, embed, head = grid.rows
    assert one.step_time_s == same.step_time_s
    assert one.communication_s > max(embed.communication_s, head.communication_s)


# Wrong arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": "tpu"}, "hardware 'tpu' is neither"),
        ({"network": "dsl"}, "network must be one of 'isolated', 'in-training', 'no-rails' for h100, got 'dsl'"),
        ({"optimizer_states": -1}, "optimizer_states must be a non-negative "),
        ({"reshard_after_forward": 3}, "reshard_after_forward=3 must divide the number of ranks"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward must be"),
        ({"mp_policy": "bf16"}, "mp_policy must be"),
        ({"passes": []}, "passes must be"),
        ({"example_inputs": TOKENS}, "example_inputs must be a tuple"),
        ({"example_inputs": None}, "explain needs example_inputs"),
        ({"units": "layers.*"}, "units must be a sequence"),
    ],
)
def test_wrong_arguments(options, message):
    """The message names the argument."""
    with pytest.raises(ArgumentError, match=message):
        graphshard.explain(meta_net(width=16), (8,), **{"example_inputs": (TOKENS,), **options})


def test_wrong_grids():
    """A missing list, and an unknown option."""
    with pytest.raises(ArgumentError, match=r"hardware of a grid must be a list, got 'h100'"):
        graphshard.explain_grid(meta_net(width=16), [(8,)], example_inputs=(TOKENS,), hardware="h100")
    with pytest.raises(ArgumentError, match=r"settings\['x'\] got .* 'reshard'\. Did you mean"):
        graphshard.explain_grid(meta_net(width=16), [(8,)], example_inputs=(TOKENS,), settings={"x": {"reshard": 1}})


def test_mesh_of_one_rank(study):
    """There are no collectives."""
    alone = study.explain((1,), graphshard.profiling.load_profile("h100"), "isolated")
    assert alone.communication_s == 0
    assert alone.limit == "compute"
    assert math.isfinite(alone.gap)

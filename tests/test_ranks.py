"""The pools of ranks and the fake world that other tests use."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import MOST_THREADS, FakeWorld, RankError, RankPool, Ranks


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _scale(rank: int, world_size: int, factor: torch.Tensor) -> dict[str, object]:
    return {"rank": (rank, world_size), "tensor": factor * rank}


def test_values_come_per_rank(ranks: Ranks) -> None:
    results = ranks(2).run(_scale, torch.tensor([1.0, 2.0]))
    assert [result["rank"] for result in results] == [(0, 2), (1, 2)]
    torch.testing.assert_close(results[1]["tensor"], torch.tensor([1.0, 2.0]), rtol=0, atol=0)


def _all_reduce(rank: int, world_size: int) -> int:
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce(ranks: Ranks, world_size: int) -> None:
    assert ranks(world_size).run(_all_reduce) == [world_size * (world_size + 1) // 2] * world_size


def test_processes_are_reused(ranks: Ranks) -> None:
    """By runs of the same number of ranks, and of fewer."""
    pids = ranks(3).run(_pid)
    assert len({os.getpid(), *pids}) == 4
    assert ranks(3).run(_pid) == pids
    assert ranks(1).run(_pid) == pids[:1]
    assert ranks(4).run(_pid)[:3] == pids
    assert ranks(2).run(_all_reduce) == [3, 3]


def _level(rank: int, world_size: int) -> str | None:
    return os.environ.get("GRAPHSHARD_VERIFY")


def test_the_first_rank_verifies(ranks: Ranks) -> None:
    assert ranks(3).run(_level) == [os.environ["GRAPHSHARD_VERIFY"], "off", "off"]


def _with_threads(rank: int, world_size: int, threads: int) -> int:
    for _ in range(threads):
        threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
    return os.getpid()


@pytest.mark.slow
def test_ranks_with_many_threads_are_replaced(ranks: Ranks) -> None:
    first = ranks(1).run(_with_threads, 1)
    assert ranks(1).run(_with_threads, MOST_THREADS) == first
    assert ranks(1).run(_with_threads, 0) != first


def _footprint(rank: int, world_size: int) -> tuple[int, str, bool]:
    threads = os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    return torch.get_num_threads(), threads, "torch._dynamo" in sys.modules


@pytest.mark.slow
def test_pool_is_small_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with RankPool() as pool:
        assert pool.run(1, _footprint) == [(1, "1", False)]
        (pid,) = pool.run(1, _pid)
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _hash(rank: int, world_size: int) -> int:
    return hash("layers.0.weight")


@pytest.mark.slow
def test_hash_seeds_differ(ranks: Ranks) -> None:
    assert len(set(ranks(2).run(_hash))) == 2


def _fail_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


@pytest.mark.slow
def test_error_of_one_rank(ranks: Ranks) -> None:
    """The waiting ranks are woken, and the same processes continue."""
    pids = ranks(4).run(_pid)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 4: ValueError: boom on 1\n") as caught:
        ranks(4).run(_fail_on, 1)
    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert text.index("---- rank 1") < min(text.index(f"---- rank {rank}") for rank in (0, 2, 3))
    assert text.count("in _fail_on") == 4
    assert ranks(4).run(_pid) == pids
    assert ranks(4).run(_all_reduce) == [10] * 4


def _leave_pending(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.ones(3), async_op=True)
    raise ValueError("all fail")


def test_pending_collective_does_not_meet_the_next_run(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="all fail"):
        ranks(2).run(_leave_pending)
    assert ranks(2).run(_all_reduce) == [3, 3]


def _hang_on(rank: int, world_size: int, hanging: int) -> None:
    if rank != hanging:
        raise ValueError("the other fails")
    time.sleep(1000)


@pytest.mark.slow
def test_hanging_rank_has_a_grace_after_an_error(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"^rank 0 of 2: ValueError: the other fails\n") as caught:
        ranks(2).run(_hang_on, 1, grace=0.5)
    hanging = str(caught.value).split("---- rank 1: no answer within 0.5 s after the first error\n")[1]
    assert "in _hang_on" in hanging


def _barrier_on(rank: int, world_size: int, lonely: int) -> None:
    if rank == lonely:
        dist.barrier()
    time.sleep(1000)


@pytest.mark.slow
def test_hanging_ranks_are_shown_and_replaced(ranks: Ranks) -> None:
    pids = ranks(2).run(_pid)
    with pytest.raises(RankError, match=r"^rank \d of 2: no answer within 1 s\n") as caught:
        ranks(2).run(_barrier_on, 0, timeout=1)
    stacks = dict(zip(("", "0", "1"), str(caught.value).split("---- rank ")))
    assert "in barrier" in stacks["0"]
    assert "in barrier" not in stacks["1"]
    assert "in _barrier_on" in stacks["1"]
    assert not set(pids) & set(ranks(2).run(_pid))


def _exit_on(rank: int, world_size: int, exiting: int) -> None:
    if rank == exiting:
        os._exit(3)
    dist.barrier()


@pytest.mark.slow
def test_dead_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2: died with exit code 3\n"):
        ranks(2).run(_exit_on, 1)
    assert ranks(2).run(_all_reduce) == [3, 3]


def _print(rank: int, world_size: int) -> None:
    print(f"hello from {rank}")
    os.write(2, b"and from C\n")


def test_output_is_relayed(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2).run(_print)
    lines = [f"[rank {rank}] {text}" for rank in (0, 1) for text in (f"hello from {rank}", "and from C")]
    assert capsys.readouterr().out.splitlines() == lines


def test_function_must_have_a_name(ranks: Ranks) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ranks(2).run(lambda rank, world_size: 0)


def _unpicklable(rank: int, world_size: int) -> object:
    return (lambda: 0) if rank == 1 else None


def test_value_that_cannot_be_sent(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2: .*_unpicklable"):
        ranks(2).run(_unpicklable)


def _names_after(rank: int, world_size: int, extra_groups: int) -> tuple[list[str], float, float]:
    """Return the names of a mesh's groups, the value of a DTensor operation on it, and a random number."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for _ in range(extra_groups):
        dist.new_group([rank for rank in range(world_size) if rank % 2])
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()]) * 2
    total = x.sum().full_tensor().item()
    assert dist.distributed_c10d._world.group_count < 10
    return list(x.device_mesh._dim_group_names), total, torch.rand(()).item()


@pytest.mark.slow
def test_runs_do_not_see_each_other(ranks: Ranks) -> None:
    """Groups of earlier runs neither accumulate nor reappear through DTensor's caches."""
    plain = ranks(4).run(_names_after, 0)
    extra = ranks(4).run(_names_after, 2)
    assert plain[0][0] != extra[0][0]
    assert ranks(4).run(_names_after, 0) == plain
    assert {result[1:] for result in plain + extra} == {(8.0, plain[0][2])}


def _threads(rank: int, world_size: int, width: int) -> int:
    """Count the threads of the rank; with a width, first redistribute a tensor, whose plan DTensor caches by shape.

    All threads count: gloo's get their names some time after they start.
    """
    if width:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # seconds on new ranks

        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))
        sharded = distribute_tensor(torch.ones(world_size, width), mesh, [Replicate(), Shard(0)])
        assert sharded.full_tensor().sum() == width * world_size
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_groups_of_earlier_runs_end(ranks: Ranks) -> None:
    """Their threads poll a hundred times a second, on every rank."""

    def threads_after(*widths: int) -> int:
        for width in widths:
            ranks(2).run(_threads, width)
        return max(ranks(2).run(_threads, 0))

    once = threads_after(1)
    assert threads_after(2, 3, 4) == once


def test_fake_world(fake_world: FakeWorld) -> None:
    fake_world(8)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "fake")
    init_device_mesh("cpu", (2, 4))
    fake_world(4, rank=3)
    assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
    dist.barrier()


def test_fake_world_ends_with_its_test() -> None:
    assert not dist.is_initialized()


@pytest.mark.gpu
def test_gpu_mark() -> None:
    assert torch.cuda.is_available()

"""What `explain` says of itself: no loss, fewer GPUs, what it was compared with; numbers and tables for other tools."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.cli.main import main
from graphshard.errors import ArgumentError
from graphshard.predict.step_prediction import count_tokens
from graphshard.profiling import metrics, profile_step
from tests.helpers import Blocks
from tests.predict.test_explain import BF16, TOKENS, meta_net
from tests.ranks import FakeWorld

ROOT = Path(__file__).parents[2]
NEVER = "predicted, not measured: predictions were never compared with several GPUs of ours"


def test_notes() -> None:
    """A loss needs no note; 16 GPUs on two nodes are no faster than 8 in one where communication is all."""
    found = graphshard.explain(meta_net(), (8,), example_inputs=(TOKENS,), mp_policy=BF16)
    assert found.notes == (NEVER,)
    assert f"* {NEVER}" in str(found)
    assert list(found.to_dict()["notes"]) == [NEVER]
    with torch.device("meta"):
        wide = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)))
    one, two = (
        graphshard.explain(wide, (n,), example_inputs=(torch.ones(1, 4096),), network="in-training") for n in (8, 16)
    )
    assert one.notes[0].startswith("the call returns no loss: backward starts from gradients of its outputs")
    (fewer,) = (note for note in two.notes if "GPUs would be as fast" in note)
    assert fewer.startswith("8 GPUs would be as fast with the same inputs of each")
    assert one.tokens_per_second >= two.tokens_per_second, "planned for 8, too"
    assert not any("as fast" in note for note in one.notes)
    here = graphshard.explain(Blocks(2), (2,), example_inputs=(torch.ones(3, 4),), hardware="cpu-gloo")
    assert NEVER not in here.notes, "it is not a GPU"


def test_tokens_of_a_call() -> None:
    """By their name, or else the largest integers: lengths, masks and three kinds of positions are no tokens."""
    tokens, lengths = torch.zeros(1, 12, dtype=torch.long), torch.zeros(4, dtype=torch.int32)
    mask, positions = torch.ones(1, 1, 12, 12, dtype=torch.bool), torch.zeros(3, 1, 12, dtype=torch.long)
    assert count_tokens((lengths, tokens, mask), {}) == 12
    assert count_tokens((), {"cu_seqlens": lengths, "position_ids": positions, "batch": {"input_ids": tokens}}) == 12
    assert count_tokens((torch.ones(5, 3), mask), {}) == 5, "the batch size"
    assert count_tokens((2,), {}) == 1


def test_metrics_and_tables(fake_world: FakeWorld) -> None:
    """Dicts of floats of the model, a prediction and a measured step; HTML for notebooks, with names escaped."""
    fake_world(2)
    model = graphshard.compile(Blocks(2), init_device_mesh("cpu", (2,)), backend="eager")
    x = torch.ones(3, 4)
    assert metrics(model) == {"captures": 0.0, "programs": 0.0, "regions": 0.0, "compile_s": 0.0}
    profile = profile_step(model, (x,), loss=torch.sum)
    found = graphshard.explain(Blocks(2), (2,), example_inputs=(x,), backend="eager", hardware="cpu-gloo")
    numbers = metrics(model)
    assert numbers["captures"] == 1.0
    assert numbers["predicted_step_s"] == pytest.approx(profile.metrics()["predicted_step_s"])
    assert numbers["predicted_exposed_s"] == pytest.approx(found.exposed_comm_s)
    assert found.metrics()["memory_optimizer_state_bytes"] == found.memory["optimizer state"]
    assert profile.metrics()["step_s"] == profile.step.measured.median
    for given in (numbers, found.metrics(), profile.metrics()):
        assert all(type(value) is float for value in given.values())
    (program,) = graphshard.programs(model)
    assert program.plan is not None
    for shown, text in ((program, "reorder"), (program.plan, "gather"), (found, "MFU"), (profile, "exposed")):
        page = shown._repr_html_()
        assert page.startswith("<p><b>")
        assert text in page
    program.model = "<script>"
    assert "<script>" not in program._repr_html_()
    with pytest.raises(ArgumentError, match="compile"):
        metrics(nn.Linear(2, 2))


def log_metrics() -> types.FunctionType:
    """Return the callback of the manual."""
    page = (ROOT / "docs" / "how_to" / "throughput.md").read_text()
    code = page[page.index("def log_metrics") :].partition("\n\n\n")[0]
    names = {"graphshard": graphshard}
    exec(code, names)
    return names["log_metrics"]  # type: ignore[return-value]


@pytest.fixture
def model(mesh: object) -> nn.Module:
    assert dist.get_world_size() == 1
    found = graphshard.compile(Blocks(2), mesh, backend="eager")  # type: ignore[arg-type]
    found(torch.ones(3, 4))
    return found


def test_tensorboard(model: nn.Module, tmp_path: Path) -> None:
    """The callback writes scalars that TensorBoard reads."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        log_metrics()(model, writer.add_scalar, 3)
    read = EventAccumulator(str(tmp_path)).Reload()
    (event,) = read.Scalars("graphshard/captures")
    assert (event.step, event.value) == (3, 1.0)
    assert {f"graphshard/{name}" for name in metrics(model)} == set(read.Tags()["scalars"])


def test_wandb(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback logs to a run of Weights & Biases that is offline."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="graphshard") as run:
        log_metrics()(model, lambda name, value, step: run.log({name: value}, step=step), 3)
    (written,) = tmp_path.rglob("run-*.wandb")
    assert all(f"graphshard/{name}".encode() in written.read_bytes() for name in metrics(model))


def test_config_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--hf` makes the model of a config file with its loss; other files are one line of error."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes).save_pretrained(tmp_path)
    out = tmp_path / "found.json"
    given = ["explain", "--hf", str(tmp_path / "config.json"), "--mesh", "8", "--batch", "1,16"]
    assert main([*given, "--json", str(out)]) == 0
    assert "LlamaForCausalLM, 16 tokens per rank" in capsys.readouterr().out
    assert json.loads(out.read_text())["notes"] == [NEVER], "it returns its loss"
    (tmp_path / "other.json").write_text('{"model_type": "nothing"}')
    for wrong, text in (
        ([str(tmp_path / "other.json")], "makes no causal language model"),
        ([str(tmp_path / "missing.json")], "there is no file"),
    ):
        assert main(["explain", "--hf", *wrong, "--mesh", "8", "--batch", "1,16"]) == 2
        assert text in capsys.readouterr().err
    assert main(["explain", "--mesh", "8", "--batch", "1,16"]) == 2
    assert "--hf config.json" in capsys.readouterr().err

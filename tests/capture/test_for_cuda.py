"""Programs for GPUs, captured where there is none: torch's decisions are those that it takes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.capture.cuda_attention import _bias, attention
from graphshard.ir.driver_internals import stand_in, stands_in
from graphshard.ir.printer import print_program
from graphshard.ir.program import Program
from graphshard.lower.regions import cut
from graphshard.passes import ToDevice
from graphshard.pipeline.pipeline import run_pass
from tests import helpers
from tests.helpers import Blocks

pytest.importorskip("cffi")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU"),
]

TOKENS = torch.zeros(2, 16, dtype=torch.int64)

# None, but where torch was built for CUDA.
ACCELERATOR = torch._C._accelerator_getAccelerator()
BUILT_FOR_CUDA = hasattr(torch._C, "_cuda_getCurrentRawStream")


@pytest.fixture(autouse=True)
def h100() -> Iterator[None]:
    with stand_in((9, 0)):
        yield


def captured(module: nn.Module, *args: Any, dtype: torch.dtype | None = None) -> Program:
    """The joint program of a module on a GPU."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    return helpers.captured(module, args, mp_policy=policy, device=torch.device("cuda", 0))


def operators(program: Program) -> list[str]:
    return [str(node.target) for node in program.phases["joint"].module.graph.nodes if node.op == "call_function"]


class Attention(nn.Module):
    """Causal attention with dropout."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(x.shape)))


class Gpt(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (None, "efficient")])
def test_gpt_has_the_kernels_of_a_gpu(dtype: torch.dtype | None, kernel: str) -> None:
    program = captured(Gpt(), TOKENS, dtype=dtype)
    found = operators(program)
    assert found.count(f"aten._scaled_dot_product_{kernel}_attention.default") == 2
    assert found.count(f"aten._scaled_dot_product_{kernel}_attention_backward.default") == 2
    assert found.count("aten.native_dropout.default") == 2
    text = print_program(program)
    assert not any(word in text for word in ("for_cpu", "mkldnn", "bernoulli", "cpu"))
    devices = {node.meta["val"].device for node in program.phases["joint"].placeholders}
    assert devices == {torch.device("cuda", 0)}


def test_llama_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.LlamaForCausalLM(config)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, labels=tokens).loss

    found = operators(captured(Loss(), TOKENS, dtype=torch.bfloat16))
    assert found.count("aten._scaled_dot_product_flash_attention.default") == 2
    assert found.count("aten._scaled_dot_product_flash_attention_backward.default") == 2
    assert not [name for name in found if "for_cpu" in name]


class Once(nn.Module):
    """Attention with arguments of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.scale, self.kwargs = nn.Parameter(torch.ones(())), kwargs

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * self.scale, k, k, **self.kwargs).sum()


def heads(count: int, length: int = 16, size: int = 32, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(2, count, length, size, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "kwargs", "kernel"),
    [
        (heads(4), heads(4), {}, "flash"),
        (heads(4), heads(2), {"enable_gqa": True}, "flash"),
        (heads(4, size=20), heads(4, size=20), {}, "flash"),
        (heads(4), heads(4, length=24), {"is_causal": True}, "efficient"),
        (heads(4, dtype=torch.float32), heads(4, dtype=torch.float32), {}, "efficient"),
        (heads(4), heads(4), {"dropout_p": 0.5}, "flash"),
        (heads(4, size=512), heads(4, size=512), {}, "efficient"),
        (heads(4, dtype=torch.float32), heads(2, dtype=torch.float32), {"enable_gqa": True}, "math"),
        (heads(4, dtype=torch.float64), heads(4, dtype=torch.float64), {}, "math"),
    ],
)
def test_which_attention(q: torch.Tensor, k: torch.Tensor, kwargs: dict[str, Any], kernel: str) -> None:
    found = operators(captured(Once(**kwargs), q, k, dtype=q.dtype))
    fused = {name.split("_")[4] for name in found if name.startswith("aten._scaled_dot_product_")}
    assert fused == ({kernel} if kernel != "math" else set())
    assert ("aten.bmm.default" in found or "aten.matmul.default" in found) == (kernel == "math")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * self.scale, q, q, attn_mask=mask).sum()


def test_a_mask_takes_memory_efficient_attention_and_is_laid_out_for_it() -> None:
    mask = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    program = captured(Masked(), heads(4, length=13), mask, dtype=torch.bfloat16)
    (node,) = program.phases["joint"].module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._scaled_dot_product_efficient_attention.default
    )
    bias = node.args[3].meta["val"]
    assert list(bias.shape) == [2, 4, 13, 13]
    assert bias.stride()[-2] == 16


def test_kernels_that_sdpa_kernel_allows() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = operators(captured(Once(), heads(4), heads(4), dtype=torch.bfloat16))
    assert "aten._scaled_dot_product_cudnn_attention.default" in found
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(graphshard.CaptureError, match=r"that torch\.nn\.attention\.sdpa_kernel allows"),
    ):
        captured(Once(), heads(4, dtype=torch.float32), heads(4, dtype=torch.float32))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.b(F.gelu(self.a(x)))
            return F.softmax(y, -1).sum()


def test_autocast_is_cudas() -> None:
    program = captured(Autocast(), torch.zeros(4, 8))
    products = program.phases["joint"].module.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}
    (softmax,) = program.phases["joint"].module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._softmax.default
    )
    assert softmax.meta["val"].dtype == torch.float32


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum() if torch.cuda.is_available() and x.is_cuda else (x - self.w).sum()


def test_a_forward_that_asks_for_a_gpu_is_told_that_there_is_one() -> None:
    assert "aten.mul.Tensor" in operators(captured(Asks(), torch.zeros(4)))


class Calls(nn.Module):
    """Calls a function of `torch.cuda`, whose result it leaves alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.w, self.name = nn.Parameter(torch.ones(4)), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(torch.cuda, self.name)()
        return (x * self.w).sum()


@pytest.mark.skipif(BUILT_FOR_CUDA, reason="torch built for CUDA has other words for it")
@pytest.mark.parametrize("name", ["current_stream", "Stream", "Event", "mem_get_info"])
def test_what_only_a_gpu_can_answer(name: str) -> None:
    with pytest.raises(graphshard.CaptureError) as caught:
        captured(Calls(name), torch.zeros(4))
    text = str(caught.value)
    assert "    getattr(torch.cuda, self.name)()\nThere is no GPU here. Without one torch.cuda says that" in text
    assert "outside of forward, or make the program where there is a GPU.\n(" in text


class Elsewhere(nn.Module):
    """Adds positions that are made on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w + torch.arange(4)).sum()


def test_what_forward_makes_on_the_cpu() -> None:
    """As where there is a GPU, with the remedy."""
    with pytest.raises(graphshard.CaptureError) as caught:
        captured(Elsewhere(), torch.zeros(4))
    text = str(caught.value)
    assert "    return (x * self.w + torch.arange(4)).sum()\nTensors on a CPU and on a GPU meet here" in text
    assert "torch.arange(n, device=x.device)" in text


class OfWhichKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w if torch.cuda.get_device_capability() >= (9, 0) else x - self.w).sum()


def test_a_forward_that_asks_which_gpu_there_is() -> None:
    assert "aten.mul.Tensor" in operators(captured(OfWhichKind(), torch.zeros(4)))


def test_states_of_generators_have_sixteen_bytes() -> None:
    program = captured(Gpt(checkpointed=True), TOKENS, dtype=torch.bfloat16)
    backward = helpers.through(program, "partition").phases["backward"]
    text = print_program(program)
    # torch 2.14 knows that attention without dropout draws nothing.
    drawn = 2 if TorchVersion(torch.__version__) < "2.14" else 0
    assert ("u8[16]" in text) == bool(drawn)
    assert "u8[5056]" not in text
    states = [slot for slot in backward.inputs if "random_state" in slot.name]
    assert len(states) == len(helpers.calls(backward, "run_with_rng_state")) == drawn


def regions_of(program: Program) -> list[tuple[str, str]]:
    return [(call.region.key, call.region.text) for call in cut(program.phases["joint"])]


class Positions(nn.Module):
    """Makes a tensor where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w + torch.arange(4, device=x.device)).sum()


@pytest.mark.parametrize("module", [Positions(), Blocks(2)])
def test_regions_have_no_device_index(module: nn.Module) -> None:
    x = torch.zeros(2, 4)
    program = captured(module, x)
    found = regions_of(program)
    run_pass(ToDevice("cuda:3"), program)
    (first, *_) = program.phases["joint"].placeholders
    assert first.meta["val"].device == torch.device("cuda:3")
    assert found == regions_of(program)
    assert all("cuda:" not in text and "cuda" in text for _, text in found)


def test_an_operator_without_a_kernel_for_cuda() -> None:
    @torch.library.custom_op("graphshard_tests::cpu_only", mutates_args=(), device_types="cpu")
    def cpu_only(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    cpu_only.register_fake(lambda x: torch.empty_like(x))
    cpu_only.register_autograd(lambda ctx, grad: grad)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.graphshard_tests.cpu_only(x * self.w).sum()

    with pytest.raises(graphshard.CaptureError) as caught:
        captured(Model(), torch.zeros(4))
    assert "graphshard_tests.cpu_only.default has no kernel for CUDA" in str(caught.value)
    assert "torch.library.register_kernel" in str(caught.value)


def test_cpu_kernels_by_name_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 4, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x * self.w
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].sum()

    with pytest.raises(graphshard.CaptureError, match=r"_for_cpu\.default has no kernel for CUDA"):
        captured(Model(), torch.zeros(2, 4, 8, 8))


class TestAfterwards:
    """Nothing outlives the block; `h100` is not used."""

    @pytest.fixture(autouse=True)
    def h100(self) -> None:
        pass

    def test_nothing_is_left(self) -> None:
        before = {name: vars(torch.cuda).get(name) for name in dir(torch.cuda)}
        for _ in range(2):
            with stand_in((8, 0)):
                assert torch.cuda.get_device_capability() == (8, 0)
                assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB"
        assert {name: vars(torch.cuda).get(name) for name in dir(torch.cuda)} == before
        assert not torch.cuda.is_available()
        assert torch._C._accelerator_getAccelerator() == ACCELERATOR
        assert hasattr(torch._C, "_cuda_getCurrentRawStream") == BUILT_FOR_CUDA
        assert not stands_in()
        assert torch.autograd.is_multithreading_enabled()
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0, 2.0]

    def test_nothing_is_left_after_an_error(self) -> None:
        with pytest.raises(KeyError), stand_in((9, 0)):
            raise KeyError
        assert torch._C._accelerator_getAccelerator() == ACCELERATOR
        assert not torch.cuda.is_available()

    def test_a_file_for_several_gpus_does_not_say_which_one_there_is(self, tmp_path: Path) -> None:
        """All would go the way of the first."""
        given: dict[str, Any] = {"example_inputs": (torch.zeros(4),), "device": "cuda", "backend": "eager"}
        with pytest.raises(graphshard.CaptureError) as caught:
            graphshard.export(OfWhichKind(), (2,), tmp_path / "x.gshard", **given, capability=[(8, 0), (9, 0)])
        text = str(caught.value)
        assert "torch.cuda.get_device_capability() >= (9, 0) else" in text
        assert "of which kind, if capability= names one alone" in text
        assert "get_device_capability answers otherwise for each GPU of capability=; export for one alone" in text
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "asks",
        [
            lambda has: has >= (8, 0),
            lambda has: not has < (7, 5),
            lambda has: has != (7, 5),
            lambda has: has > (7, 5) and not has <= (7, 5),
            lambda has: has[1] == 0,
        ],
    )
    def test_what_is_the_same_of_several_gpus_may_be_asked(self, asks: Any) -> None:
        with stand_in((8, 0), among=[(8, 0), (9, 0)]):
            has = torch.cuda.get_device_capability()
            assert asks(has)
            for differs in (lambda: has >= (9, 0), lambda: has[0], lambda: tuple(has), lambda: has == (9, 0)):
                with pytest.raises(RuntimeError, match="answers otherwise for each GPU of capability="):
                    differs()

    def test_a_package_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "cffi", None)
        with (
            pytest.raises(graphshard.ArgumentError, match=r"by the package cffi, which is not installed") as caught,
            stand_in((9, 0)),
        ):
            pass
        assert "pip install 'graphshard[cross]'" in str(caught.value)
        assert torch._C._accelerator_getAccelerator() == ACCELERATOR

    def test_another_build_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: None)
        with pytest.raises(graphshard.ArgumentError, match="Export where there is a GPU"), stand_in((9, 0)):
            pass
        monkeypatch.undo()
        assert torch._C._accelerator_getAccelerator() == ACCELERATOR
        assert not torch.cuda.is_available()

    def test_masks_mean_what_they_do_in_eager_mode(self) -> None:
        q, mask = torch.randn(2, 4, 5, 8), torch.rand(2, 1, 5, 5) < 0.7
        mask[..., 0] = True
        expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(attention(q, q, q, attn_mask=mask), expected)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, attn_mask=_bias(mask, q, q)), expected)

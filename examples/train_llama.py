"""Train a small byte-level Llama on the source code of Python's standard library.

    torchrun --standalone --nproc-per-node 2 examples/train_llama.py

runs on two CPU processes (gloo) or two GPUs (NCCL) and needs no download. `--impl fsdp2` trains the same model with
FSDP2: both share everything but `shard`, which is the point of the example.

The data, learning rate and random state of a step depend only on the arguments, the step and the checkpoint. So a run
that is stopped and continued with `--resume` and the same arguments repeats the losses of an uninterrupted run, bit for
bit (on a GPU, if its kernels are deterministic).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard

CORPUS_BYTES = 8 << 20
PROMPT = b"def "
TEMPERATURE = 0.8


def main() -> None:
    args = parse_args()
    device = start_distributed()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(args.seed)
    # Every rank creates the whole model from the same seed, then keeps its shard.
    config = LlamaConfig(layers=args.layers, dim=args.dim, heads=max(1, args.dim // 64), seq=args.seq)
    with device:
        whole = Llama(config)
    num_parameters = sum(p.numel() for p in whole.parameters())
    model = shard(whole, mesh, args)
    say(f"{num_parameters / 1e6:.2f} M parameters on {mesh.size()} x {device.type}, {args.impl}")

    train(model, args, device)
    if args.sample:
        say(generate(model, args, device).decode("utf-8", errors="replace"))
    # Not in a `finally`: after an error on one rank, others may wait in a collective, and the launcher ends them.
    dist.destroy_process_group()


def shard(model: Llama, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    """Shard the model over the mesh, in place."""
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.impl == "graphshard":
        return graphshard.compile(model, mesh, mp_policy=policy, backend=args.backend)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(model: nn.Module, args: argparse.Namespace, device: torch.device) -> None:
    """Run the remaining steps, with checkpoints and reports according to the arguments."""
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    corpus = load_corpus()
    start = resume(model, optim, args.checkpoint) if args.resume else 0
    losses, grad_norms, times = [], [], []
    model.train()
    for step in range(start, args.steps):
        begin = time.perf_counter()
        for group in optim.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = batch_of(corpus, step, args, device)
        loss = model(tokens, targets)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        losses.append(mean_over_ranks(loss))
        grad_norms.append(as_float(grad_norm))
        # Reading the numbers above has synchronized with the device.
        times.append(time.perf_counter() - begin)
        rate = args.batch * args.seq * dist.get_world_size() / times[-1]
        say(
            f"step {step + 1:4}/{args.steps}  loss {losses[-1]:.4f}  grad norm {grad_norms[-1]:.3f}"
            f"  {rate:9,.0f} tokens/s  {times[-1]:.3f} s"
        )
        if args.checkpoint and is_save_step(step + 1, args):
            save(model, optim, step + 1, args.checkpoint)
    if times:
        # The first step also compiles.
        say(f"trained in {sum(times):.1f} s, median step {statistics.median(times[1:] or times):.3f} s")
    if args.json and dist.get_rank() == 0:
        write_json(
            args.json,
            {
                "impl": args.impl,
                "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
                "world_size": dist.get_world_size(),
                "device": device.type,
                "first_step": start,
                "losses": losses,
                "grad_norms": grad_norms,
                "step_times": times,
            },
        )


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate: linear warm-up over a tenth of the steps, then half a cosine to a tenth of the peak."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def as_float(norm: Tensor) -> float:
    # The norm of sharded gradients is a DTensor, of which each rank holds a part.
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


# --- data ---------------------------------------------------------------------------------------------------


def load_corpus() -> Tensor:
    """Return the concatenated modules of the standard library as bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batch_of(corpus: Tensor, step: int, args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and targets, a function of seed, step and rank: there is no state to save."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    # Drawn for all ranks together, so ranks never share a stream.
    starts = torch.randint(len(corpus) - args.seq, (dist.get_world_size(), args.batch), generator=generator)
    windows = torch.stack([corpus[i : i + args.seq + 1] for i in starts[dist.get_rank()].tolist()])
    windows = windows.to(device, torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# --- checkpoints --------------------------------------------------------------------------------------------


def is_save_step(step: int, args: argparse.Namespace) -> bool:
    """Return whether to save after `step` steps: every `--save-every`, or only at the end without it."""
    return step % args.save_every == 0 if args.save_every else step == args.steps


def save(model: nn.Module, optim: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Write a checkpoint. Data position and learning rate follow from the step; each rank has its own random state."""
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    path = folder / f"step-{step}"
    graphshard.checkpoint.save_checkpoint(path, model, optim, extra={"step": step}, per_rank=random_state)
    say(f"saved {path}")


def resume(model: nn.Module, optim: torch.optim.Optimizer, folder: Path) -> int:
    """Load the newest checkpoint, if there is one, and return its step."""
    newest = graphshard.checkpoint.latest_checkpoint(folder)
    if newest is None:
        say(f"no checkpoint in {folder}: starting from step 0")
        return 0
    extra, random_state = graphshard.checkpoint.load_checkpoint(newest, model, optim)
    if random_state is not None:  # otherwise this rank is new, with a new random state
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"])
    say(f"resumed from {newest}")
    return extra["step"]


# --- text ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(model: nn.Module, args: argparse.Namespace, device: torch.device) -> bytes:
    """Sample text after a prompt. Calls of the model are collective, so every rank makes the same calls."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = bytearray(PROMPT)
    for _ in range(args.sample):
        context = text[-args.seq :]
        # One shape for all calls; causal attention hides the padding on the right.
        window = torch.zeros(1, args.seq, dtype=torch.int64)
        window[0, : len(context)] = torch.tensor(list(context))
        logits = model(window.to(device))[0, len(context) - 1].float().cpu()
        probabilities = torch.softmax(logits / TEMPERATURE, dim=0)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)


# --- set-up and output --------------------------------------------------------------------------------------


def start_distributed() -> torch.device:
    """Join torchrun's process group, or create a world of one, and return this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        options = {"backend": "nccl", "device_id": device}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    return device


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a file that is either complete or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level Llama on Python's source code.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=100)
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=256)
    add("--batch", type=int, default=4, help="sequences per rank and step")
    add("--seq", type=int, default=128, help="bytes per sequence")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--backend", choices=["inductor", "eager"], default="inductor", help="backend of graphshard")
    add("--impl", choices=["graphshard", "fsdp2"], default="graphshard")
    add("--bf16", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write losses and step times here")
    add("--checkpoint", type=Path, metavar="DIR", help="save checkpoints in this folder")
    add("--save-every", type=int, default=0, metavar="N", help="steps between checkpoints; 0: only at the end")
    add("--resume", action="store_true", help="resume from the newest checkpoint, if there is one")
    add("--sample", type=int, default=200, metavar="N", help="bytes of text to generate; 0 for none")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint DIR")
    if args.checkpoint and not args.resume and graphshard.checkpoint.latest_checkpoint(args.checkpoint):
        parser.error(f"{args.checkpoint} holds checkpoints: add --resume, or choose another folder")
    return args


if __name__ == "__main__":
    main()
    # A gloo thread frees the tensors of the last collective and needs Python for it; if Python is shutting down by
    # then, the process aborts. So exit without shutting Python down.
    os._exit(0)

"""Sharded checkpoints that are complete or refused, and initialization of sharded parameters.

    graphshard.checkpoint.save_checkpoint("checkpoints/step-100", model, optimizer, extra={"step": 100})
    latest = graphshard.checkpoint.latest_checkpoint("checkpoints")

`save_load.py` saves and loads with torch.distributed.checkpoint (DCP), also while training goes on. `_manifest.py`
knows which files a checkpoint consists of. `_safe_unpickler.py` reads DCP's files without running code.

* **Random initialization is replayed on full tensors**, one at a time, in a dispatch mode that the user enters.
  DTensor's random numbers depend on the mesh, and on CPU on the rank.
* **Checksums are CRC-32, not SHA.** The manifest lies next to the files, so it can only show accidents. SHA-256 was 8
  times slower than CRC-32 on a CPU without SHA instructions (0.10 against 0.80 GB/s). Each rank reads a part of the
  files.
* **Unpickling is restricted rather than trusted.** DCP's reader calls `pickle.load` on the index, and
  `torch.load(weights_only=False)` on values that are not tensors.
* **Steps of saving and loading are `with ranks.together():` blocks.** Errors are exchanged at the end of each, so that
  no rank goes on into a collective that another one will not enter. DCP does this inside save and load only.
* **An asynchronous save is the same save, of a copy, in a thread.** DCP's `async_save` has no manifest and no rename,
  and ranks do not exchange its errors. One thread writes one copy at a time, so no order of exchanges needs to be
  agreed on.
* **`latest_checkpoint` is not a collective**, so that a tool or a single rank may call it. `load_checkpoint` checks
  that all ranks see the same one.

Pitfalls:

* DCP's `CheckpointException` is a `BaseException`: `except Exception` does not catch it.
* In torch 2.11 the metadata that `dcp.save` returns has no `storage_data`; the file has.
"""

from graphshard.checkpoint._manifest import latest_checkpoint
from graphshard.checkpoint.save_load import async_save_checkpoint, load_checkpoint, save_checkpoint, unsharded_init

__all__ = ["async_save_checkpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "unsharded_init"]

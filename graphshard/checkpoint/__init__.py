"""Values of sharded parameters on disk and at initialisation.

`checkpoint.py` saves and loads with torch.distributed.checkpoint (DCP), `asynchronous.py` saves while training goes on,
`together.py` makes an error of one rank one of all, `manifest.py` knows which files make a whole, `unpickling.py` reads
DCP's files without running code. `load_hook.py` is what `load_state_dict` takes beyond FSDP2. `initialize.py` is
`unsharded_init`.

* **Random initialisation is replayed on full tensors**, one at a time, in a dispatch mode that the user enters.
  DTensor's own random numbers depend on the mesh, and on CPU on the rank.
* **Full tensors are sharded by a load_state_dict pre-hook**, before any value is copied. FSDP2's answer to them is an
  error of DTensor's `copy_`, and with `assign=True` a broken model. The hook uses
  `distribute_tensor(src_data_rank=None)`, which cuts without communication. It takes a copy of the piece, so that an
  assigned parameter does not keep the full tensor alive.
* **Checksums are CRC-32, not SHA.** The manifest lies beside the files, so it can only show accidents. SHA-256 was 8
  times slower than CRC-32 on a CPU without SHA instructions (0.10 against 0.80 GB/s). Each rank reads a part of the
  files.
* **Unpickling is restricted rather than trusted.** DCP's own reader calls `pickle.load` on the index, and
  `torch.load(weights_only=False)` on values that are no tensors.
* **Steps of saving and loading are `with ranks.together():` blocks.** Errors are exchanged at the end of each, so that
  no rank goes on into a collective that another one will not enter. DCP does this inside save and load. What is around
  them is ours.
* **An asynchronous save is the same save, of a copy, in a thread.** DCP's `async_save` would take its own way: no
  manifest, no rename, and an error that the ranks do not exchange. One thread writes one copy at a time, so no order of
  exchanges needs to be agreed on.
* **`latest_checkpoint` is no collective**, so that a tool or a single rank may call it. `load_checkpoint` checks that
  all ranks see the same one.

Pitfalls:

* DCP's `CheckpointException` is a `BaseException`: `except Exception` does not catch it.
* In torch 2.11 the metadata that `dcp.save` returns has no `storage_data`; the file has.
"""

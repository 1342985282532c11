"""One step on one rank: shards, process groups, executors, autograd, microbatches.

`step.py` runs an installed program, `code.py` is what its phases run, and `values.py` what its names stand for.
`shards.py` makes parameters DTensors, `groups.py` makes process groups of mesh axes. `accumulation.py` keeps what
microbatches leave, `unsharded.py` what was gathered by hand. `gloo.py` is how collectives run on CPUs.
`arrivals.py` hands gradients over where they arrive, to an optimizer on shards
(`updates.py`), by way of their norm (`clipping.py`); `graphs.py` asks autograd whether that is all of a gradient.
`replays.py` launches runs of regions by one launch each: it decides which are captured and when, `captured_run.py` is
one of them, and `device_graphs.py` asks the device.

`peers.py` is what ranks agree on and do together: they meet in the rendezvous store (`meeting.py`), wait with patience
(`waiting.py`), and say how they are doing (`status.py`). A thread looks at one other rank (`watch.py`) and tells what
it finds where this one stands (`standing.py`), so that nobody waits for one that is not going to come (`hang_up.py`).

* **Our own runtime instead of AOTAutograd's.** The compiled step is one `autograd.Function` whose inputs are the
  DTensor parameters. AOTAutograd's wrappers would have to be traced again, or pickled, to be loaded from a file.
* **Shards are stored with room for padding** behind them, and the graph reads the padded view of the local tensor.
  After `to_empty` or `load_state_dict(assign=True)` the room is made again, once (`shards.padded_shard`).
* **A shard has no gaps and keeps its parameter's memory order.** Padding lies behind it where the sharded dim is the
  outermost in memory. Otherwise a short shard is copied into a padded buffer for the step, on the last ranks only, so
  that what the user sees stays dense. Collectives join shards along the outermost dim. The landing behind a gather
  brings them side by side, which Inductor fuses into whatever reads the parameter.
* **Gathers on gloo are launched as `torch.distributed` launches them**, not as functional collectives. Those corrupt
  the heap now and then while several are under way (torch 2.11 and 2.13; `benchmarks/gloo_gathers.py`). In the graphs
  they stay functional; only the bound executor differs, and only where gloo is the backend.
* **Reduce-scatter as all-to-all is no pass.** Rules, plans, estimates and dumps see a marked reduce-scatter. The
  executor gets the all-to-all when the group is bound: each of two ranks, and only two, because of the bits, sends the
  other its half, and adds its own to what it receives. Not under a memory limit: on a mesh with a tensor axis a step
  took 4 % more than predicted.
* **Updates are lines of the bound backward**, not nodes of the program: which gradients are used up is known when a
  step begins, and the same program serves calls without an optimizer. Torch's own step runs on a stand-in whose
  parameters are local tensors, so there is one code for formulas and state, and nothing to keep equal.
* **Steps are counted, not calls.** A step is a forward or a backward with collectives, of any model on a mesh. All
  ranks make the same ones, however many programs each of them has captured, so a number and a hash of what was launched
  say which rank is where. A meeting is named by its step, and by how many attempts at it have failed.
* **A finding says from which step on it holds.** A rank may end while others are still in the step before.
* **Ranks that live are waited for.** Nobody knows if a rank that is in its own code is going to come. It is named in a
  warning after four seconds; `GRAPHSHARD_CHECK=steps` makes an error of it.

Pitfalls:

* A slice of an inner dim has gaps. Where the captured parameter had none, a `view` behind it fails. Copy after cutting.
* gloo's threads let go of a tensor a little after the wait for it returns: tests of what is alive must be patient.
"""

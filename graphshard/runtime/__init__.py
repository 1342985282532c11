"""One step on one rank: shards, process groups, executors, autograd, microbatches.

`executable.py` runs an installed program, `bound_program.py` has the code of its phases and the values of its names.
`peers.py` is what ranks agree on and do together: they meet in the rendezvous store. A thread of each rank publishes
its status and watches another rank (`health_monitor.py`), so that no rank waits for one that is not going to come.

* **A separate runtime instead of AOTAutograd's.** The compiled step is one `autograd.Function` whose inputs are the
  DTensor parameters. AOTAutograd's wrappers would have to be traced again, or pickled, to be loaded from a file.
* **Shards are stored with room for padding** after them, and the graph reads the padded view of the local tensor.
  After `to_empty` or `load_state_dict(assign=True)` the room is made again, once (`shards.padded_shard`).
* **A shard has no gaps and keeps its parameter's memory order.** Padding follows it where the sharded dim is the
  outermost in memory. Otherwise a short shard is copied into a padded buffer for the step, on the last ranks only, so
  that what the user sees stays dense. Collectives join shards along the outermost dim. The epilogue of a gather
  brings them side by side, which Inductor fuses into the reader of the parameter.
* **Gathers on gloo are launched as `torch.distributed` launches them**, not as functional collectives, which corrupt
  the heap now and then while several are under way (torch 2.11 and 2.13; `benchmarks/gloo_gathers.py`). In the graphs
  they stay functional; only the bound executor differs, and only on gloo.
* **A bucket has one wait.** A bound executor launches a coalesced bucket by a function that registers the work with the
  first result alone. Each `wait_tensor` is a call through the dispatcher; Llama 8B would make 774 of them in a step.
* **Updates of small buckets wait for each other** (`cost.costs.joined_updates`), but not across the last launch, and
  not for the last bucket: nothing would hide them.
* **HSDP's all-reduce is launched where compute waits for its reduce-scatter**, mostly after the next unit. Launched
  directly after the reduce-scatter it would save 0.4 to 1.0 % of a predicted step (Llama 8B, H100s, 8 x 8, 64 x 8 and
  128 x 8 ranks; nothing on 2 x 512). A side stream would have to wait for the reduce-scatter instead of the compute
  stream. `Work.wait()` there ends c10d's hold on the full gradients, whose memory the compute stream could reuse while
  they are read; held until the all-reduce has been waited for, they are one more unit's at the peak (0.9 GB in float32
  for a block of 8B), which plans would have to know. On gloo, which has no streams, the host would wait.
* **Gathers and reductions share a group.** In a separate group, reductions would not queue behind gathers, but both
  share the link. Where compute hides them that changes nothing; where it does not, the link is busy all the time. With
  the bandwidth shared evenly, predicted steps are the same on 8 H100s and 0.05 to 0.15 % longer on 64 and 1,024 (Llama
  8B, 2,048 tokens). So costs would never choose it. FSDP2's `set_separate_reduce_scatter_group` makes one.
* **Reduce-scatter as all-to-all is not a pass.** Rules, plans, estimates and dumps see a marked reduce-scatter, or
  with `reduce="exchange"` an operator whose result has the dtype of sums. The executor gets the all-to-all and the sum
  when the group is bound. If the user allows no other bits, it is for two ranks of gloo only, and not under a memory
  limit: on a mesh with a tensor axis a step took 4 % more than predicted.
* **Gradients that have a graph come from eager operators** (`gradient_graphs.py`), not from a backward of the backward:
  the torch-level graph of the trace is at hand, its operators have all orders of derivatives with the bits of plain
  torch, and nothing more is captured. It knows regions without gradients and custom functions, which a joint graph
  does not.
* **Updates are lines of the bound backward**, not nodes of the program: which gradients are used up is known when a
  step begins, and the same program serves calls without an optimizer. Torch's step runs on a stand-in optimizer whose
  parameters are local tensors, so formulas and state have one implementation.
* **Steps are counted, not calls.** A step is a forward or a backward with collectives, of any model on a mesh. All
  ranks make the same ones, however many programs each of them has captured, so a number and a hash of what was launched
  say which rank is where. A rendezvous is named by its step, and by the number of attempts at it that have failed.
* **A finding says from which step on it holds.** A rank may end while others are still in the step before.
* **Ranks that live are waited for.** A rank in the user's code may still come. It is named in a warning after four
  seconds; `GRAPHSHARD_CHECK=steps` makes an error of it.

Pitfalls:

* A slice of an inner dim has gaps. Where the captured parameter had none, a `view` after it fails. Copy after cutting.
* gloo's threads free a tensor a little after the wait for it returns: tests of what is alive must be patient.
"""

"""Integrations with training tools: one file per tool, which it imports on first use.

None of the tools is a dependency: each file is given an object of its tool, so the tool is installed.

* **An object of the tool is changed, never the tool.** `use_graphshard(accelerator)` gives that accelerator another
  `prepare`; other accelerators in the process stay as they are.
* **A compiled model passes for a model of FSDP2.** It is an `FSDPModule`, which Accelerate leaves alone when it
  prepares models, saves with DCP and clips as usual. So saving, loading and accumulating are Accelerate's.

Pitfalls:

* Accelerate finds an optimizer's parameters again by their `data_ptr()`, which is 0 for every empty shard. So groups
  are put back after it has prepared them.
* Accelerate expects FSDP on GPUs only: on the CPU it drops the plugin. Its state is set here.
"""

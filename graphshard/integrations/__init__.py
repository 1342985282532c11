"""graphshard inside the tools that people train with: each file is for one tool, and imports it when it is used.

None of the tools is a dependency: what a file gets is an object of the tool's, so the tool is there.

* **An object of the tool's is changed, never the tool.** `use_graphshard(accelerator)` gives that accelerator another
  `prepare`; other accelerators in the process stay as they are.
* **A compiled model passes for one of FSDP2's.** It is an `FSDPModule`, which Accelerate leaves alone when it prepares
  models, saves with DCP and clips as FSDP2's. So nothing of its saving, loading and accumulating is written again here.

Pitfalls:

* Accelerate finds an optimizer's parameters again by their `data_ptr()`, which is 0 for every empty shard. So groups
  are put back after it has prepared them.
* Accelerate takes FSDP for something of GPUs: on the CPU it drops the plugin. Its state is told here.
"""

"""From a scheduled graph to something that can be called: operators, Inductor code, or AOTInductor packages.

`regions.py` cuts the graph at its collectives into regions and makes the graph of the executor that calls them.
`executor.py` reads the lines that run off that graph, and `lines.py` prints them. `backends.py` chooses what a region
is compiled with.

* **Views are made again in the region that uses them.** So regions exchange only real tensors, in the traced strides,
  and equal blocks give equal regions. The number of distinct regions does not grow with depth.
* **The code of an executor is ours, not what torch.fx prints of its graph.** It has few kinds of line, each of them a
  class (`lines.Line`). So the rule about frees reads lines and not text, results of regions are taken apart under their
  own names, and a parameter may be called as anything in the code.
* **Profiler ranges are a second set of generated code**, used while a profiler runs. About 500 ranges in a step of 32
  layers would cost milliseconds otherwise.
* **Random operators stay torch's own** in Inductor's regions (`fallback_random`), so dropout draws what eager mode
  draws.
* **Ranks of a machine share compilation.** They start at different regions, take a lock for each region, and find each
  other's results in Inductor's cache.
* **A package for each region, called by torch's own C++ loader** (`AOTIModelPackageLoader.boxed_run`). So loading a
  file imports nothing of Inductor, and inputs are freed as they are used up.
* **Packages come from `compile_fx_inner`, as code in the process does**, not from `aoti_compile_and_package`. The
  joint-graph passes and the second trace of that could make other kernels. On the example's regions both forms had the
  same bits.
* **For GPUs that are not here, Inductor's FX wrapper** (`cross_internals.py`): the code of a region is a graph of
  launches and operators, which is stored as any graph is, and Triton's cubins. `kernels.py` calls it, `elf.py` reads
  cubins.

Pitfalls:

* Inductor and Triton keep what they have found out about devices (`lru_cache`), and kernels by their source: the next
  capability got the kernels of the one before. Each cubin's header is compared with what was asked for.

* Batch norm of a transposed input returns other strides than its fake kernel says. Where operators run one by one,
  `view` becomes `reshape` (`regions.reshape_views`). A region that falls back to ATen gets its results restrided.
* Inductor pins outputs to the strides of the graph that it is given, whatever was recorded in the output's `meta`.
  Where a decomposition has other strides than the kernel, a copy is put into the graph (`inductor._pinned`).
* Inductor's decompositions create tensors: run `make_fx` inside the region's fake mode. Their table depends on
  `config.fallback_random` at the time it is selected.
* Inductor's C++ reductions add a guard such as `s0*s1 <= 4096`: sizes on both sides of it make two programs.
* AOTInductor takes no numbers as inputs: dynamic sizes are read off its tensors.
* Most of the time of a package, 10 s of CPU each, goes into the header of the C++ wrapper, not into the kernels.
* Inductor's CPU code has the number of threads in it.
"""

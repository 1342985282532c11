"""Lowering of a scheduled graph to callables: operators, or Inductor code.

`regions.py` cuts the graph at its collectives into regions and makes the graph of the executor that calls them.
`executor.py` reads the lines that run off that graph and prints them, and `line_rewrites.py` changes them for one use.
`backends.py` chooses what a region is compiled with: `eager.py` or `inductor.py`.

* **Views are made again in the region that uses them.** So regions exchange only real tensors, in the traced strides,
  and equal blocks give equal regions. The number of distinct regions does not grow with depth.
* **The code of an executor is not what torch.fx prints of its graph.** It has few kinds of line, each of them a class.
  So the rule about frees reads lines and not text, results of regions are unpacked under their names, and a parameter
  may have any name.
* **Profiler ranges are a second set of generated code**, used while a profiler runs. About 500 ranges in a step of 32
  layers would cost milliseconds otherwise.
* **Random operators stay torch's** in Inductor's regions (`fallback_random`), so dropout draws what eager mode draws.
* **Code is kept under the text of its region** (`region_store.py`). Inductor's cache is asked with a graph in its
  decompositions: to import Inductor, to trace 11 regions and to hash them took 2.5 to 3.2 s of a rank's CPU, and 0.2 s
  by their text. Other regions are found in Inductor's cache, which wants a tracing context, as in `torch.compile`.
  Regions for GPUs are kept with the cubins of all configurations that Inductor measures (`cubin_kernels.py`), and when
  it has chosen, with that one, so that later launches compute the same bits.
* **Ranks of a machine share compilation** (`inductor_cache.py`). Each takes a share of the regions, by locks, and
  finds what others have kept. Files are found by what their code depends on, so ranks may have other regions, other
  compilers or no cache in common. Machines without a directory in common hand on these files in the ranks' store. While
  the kernels of a share are compiled the code of the next is generated.
* **Kernels of several regions are compiled in one run** (`_batch_compile.py`). Reading the header, starting the
  compiler and linking take 0.44 s of 0.63 for a kernel (the example's 36 kernels: 22 s of CPU one by one, 2.4 s in one
  run). The text of kernels and all options stay Inductor's, and so do the instructions. Kernels that fail are compiled
  by Inductor as if nothing had been tried. A cold launch of `benchmarks.first_step` on a loaded machine took 39 CPU s,
  70 with each kernel compiled alone, and FSDP2's 45.
* **What Inductor does once begins early** (`_background_warmup.py`), in a thread during the capture. Where code of
  regions is kept it begins with the first region that is not.
* **Kernels for GPUs are compiled by Inductor's processes while code is generated** (`_batch_compile.py`): 10.7 s to a
  first step on an H100 instead of 15.5.
* **Large products in float32 are oneDNN's where the processor is not Intel's**, as MKL has slower kernels for those.
  The processor and the size decide, not a measurement, so that ranks and launches agree.
* **The header of kernels is read, not precompiled**: to precompile it takes as long as to read it four times, and few
  programs start more compilers.
* **Files have the code that a process runs** (`region_store.Kernels`), so it computes the same bits, and loading it
  imports nothing of Inductor. AOTInductor's packages took longer to compile, and as long to load.

Pitfalls:

* Batch norm of a transposed input returns other strides than its fake kernel says. Where operators run one by one,
  `view` becomes `reshape` (`regions.reshape_views`). A region that falls back to ATen gets its results restrided.
* Inductor pins outputs to the strides of the graph that it is given, whatever was recorded in the output's `meta`.
  Where a decomposition has other strides than the kernel, a copy is put into the graph (`inductor._pinned`).
* Inductor's decompositions create tensors: run `make_fx` inside the region's fake mode. Their table depends on
  `config.fallback_random` at the time it is selected.
* Settings of torch are per thread: work in another thread runs in a copy of this one's context.
* A lock of `filelock` is released when the object that took it is freed.
* A region must be a plain `GraphModule`: a lazy one calls itself again when its code is first made, and hooks of all
  modules, which `CommDebugMode` has, see it twice.
* Inductor's C++ reductions add a guard such as `s0*s1 <= 4096`: sizes on both sides of it make two programs.
* Inductor's CPU code depends on the number of threads.
"""

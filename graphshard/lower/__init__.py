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
* **Code is kept under the text of its region** (`store.py`), beside Inductor's cache. That cache is asked with a graph
  in its decompositions. To import Inductor, to trace 11 regions and to hash them, lowering took 2.5 to 3.2 s of a
  rank's CPU, and 0.2 to 0.25 s where it found them by their text (the example's model, two cores with a load of 40 to
  70, which inflates both). The name of a file holds what else the code depends on, the lowering's own source included.
  What is not kept so is found in Inductor's graph cache, which wants a tracing context, as it has in `torch.compile`.
* **Ranks of a machine share compilation.** Each takes a share of the regions, by locks, and finds what others have
  kept (`shares.py`). Nothing is handed from rank to rank, so ranks may have other regions, other compilers or no cache
  in common.
  While the kernels of a share are compiled the code of the next is generated; all are there before another rank is
  waited for.
* **Kernels of several regions are compiled in one run** (`together.py`). Reading the header, starting the compiler and
  linking take 0.44 s of 0.63 for a kernel (the example's 36 kernels: 22 s of CPU one by one, 2.4 s in one run). The
  text of kernels and all options stay Inductor's. The instructions of 35 of the example's kernels were compared,
  without their operands, and are the same. Generated code gets a kernel that is pending, and the libraries are put
  where Inductor looks for them, each whole or not there. What fails is compiled by Inductor as if nothing had been
  tried.
* **What Inductor does once begins early** (`cpu_internals.begin`), in a thread beside the capture: it asks compiler and
  CPU for their vector instructions. What it asks is compiled as one file, where Inductor compiles and loads seven.
  Where code of regions is kept it begins with the first that is not.
* **Kernels for GPUs are compiled by Inductor's processes while code is generated** (`triton_internals.py`), so
  Inductor's own cache is given a region when its kernels are there, and not before: it keeps both together, and the
  next process would compile them again (10.7 s to a first step on an H100 instead of 15.5).
* **Large products in float32 are oneDNN's where the processor is not Intel's** (`onednn_internals.py`), as MKL has
  slower kernels for those. By the processor and the size alone, and not by a measurement, so that ranks and launches
  decide alike.
* **The header of kernels is read, not precompiled**, by the first three compilers that a program starts: to
  precompile it takes as long as to read it four times. A header that is there is used.
* **What lies in Inductor's cache is not trusted** (`damage.py`). It is there, so Inductor never makes it again, and to
  load a library that a crash has cut short ends the process.
* **A package for each region, called by torch's own C++ loader** (`AOTIModelPackageLoader.boxed_run`). So loading a
  file imports nothing of Inductor, and inputs are freed as they are used up.
* **Packages come from `compile_fx_inner`, as code in the process does**, not from `aoti_compile_and_package`. The
  joint-graph passes and the second trace of that could make other kernels. On the example's regions both forms had the
  same bits.
* **For GPUs that are not here, Inductor's FX wrapper** (`cross_internals.py`): the code of a region is a graph of
  launches and operators, which is stored as any graph is, and Triton's cubins. `kernels.py` calls it, `elf.py` reads
  cubins.
* **For predictions the scheduler is enough** (`scheduler_internals.py`): Inductor's passes, lowering and fusion run as
  when a region is compiled, and end before code is generated, so it takes no Triton compiler and tenths of a second.

Pitfalls:

* Inductor and Triton keep what they have found out about devices (`lru_cache`), and kernels by their source: the next
  capability got the kernels of the one before. Each cubin's header is compared with what was asked for.

* Batch norm of a transposed input returns other strides than its fake kernel says. Where operators run one by one,
  `view` becomes `reshape` (`regions.reshape_views`). A region that falls back to ATen gets its results restrided.
* Inductor pins outputs to the strides of the graph that it is given, whatever was recorded in the output's `meta`.
  Where a decomposition has other strides than the kernel, a copy is put into the graph (`inductor._pinned`).
* Inductor's decompositions create tensors: run `make_fx` inside the region's fake mode. Their table depends on
  `config.fallback_random` at the time it is selected.
* Inductor must find each symbol of a size that depends on values in some input by itself: a sum of two gets one of its
  own (`unknown.py`).
* Inductor knows GCC by its name. One that is called `c++` gets a header in a place where clang would look for it, and
  reads the text each time, without a word. The log says so.
* Settings of torch are those of a thread: work in another one runs in a copy of this one's context.
* A lock of `filelock` is released when nobody holds the object that took it.
* A region must be a plain `GraphModule`: a lazy one calls itself again when its code is first made, and hooks of all
  modules, which `CommDebugMode` has, see it twice.
* Inductor's C++ reductions add a guard such as `s0*s1 <= 4096`: sizes on both sides of it make two programs.
* AOTInductor takes no numbers as inputs: dynamic sizes are read off its tensors.
* Most of the time of a package, 10 s of CPU each, goes into the header of the C++ wrapper, not into the kernels.
* Inductor's CPU code has the number of threads in it.
"""

"""Code for absent GPUs: compilation, kernels in files, and a GPU's answers on a machine without one.

`driver.py` answers for the GPU while a program is captured and compiled. `compile_for_gpus.py` compiles regions with
Inductor's FX wrapper and Triton; the code of a region is a graph of launches and operators, and cubins
(`gpu_kernels.py`). For predictions it stops after Inductor's scheduler, in tenths of a second.

Compilation needs the extra `cross` (Triton and cffi), so these modules are imported when they are used.

Pitfall: Inductor and Triton keep what they have found out about devices (`lru_cache`), and kernels by their source: the
next capability got the kernels of the one before. Each cubin's header is compared with what was asked for.
"""

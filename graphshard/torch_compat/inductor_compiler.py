"""Inductor, the compiler: its entry points, kernels, scheduler and caches. Importing it takes seconds."""

from __future__ import annotations

from torch._inductor import async_compile
from torch._inductor.codecache import CppPythonBindingsCodeCache, FxGraphCache, PyCodeCache, get_lock_dir
from torch._inductor.compile_fx import compile_fx_inner, get_cpp_wrapper_config
from torch._inductor.decomposition import decompositions as inductor_decompositions
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import Dep, MemoryDep, WeakDep
from torch._inductor.ir import MultiOutput, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.mkldnn_ir import LinearUnary
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import triton_compat
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import get_dtype_size, sympy_product
from torch._inductor.virtualized import V

"""From a module and one call to a joint ATen graph.

    module, one call --Dynamo--> torch-level graph, guards, bytecode --AOTAutograd--> joint ATen graph -> Program

**Tracing** (`capture.py`, by the tracers of `torch.export`):

* **Dynamo traces what Python means** (`dynamo_capture.py`), as for `torch.export.export(strict=True)`. Its guards say
  which later calls a program serves, its bytecode replays what forward does to objects.
* **AOTAutograd differentiates the torch-level graph** (`joint_graph.py`), under full fake parameters in the compute
  dtype. So nothing is allocated, and custom backwards, hooks and checkpointed regions are in the graph.
* **A unit's boundary is a call** (`unit_boundaries.py`): its class casts inputs and results, and sends inputs through
  one node of autograd, as FSDP2's hooks do. Sums of gradients then have FSDP2's order, hence its bits.
* **Of many equal blocks a few are traced** (`repeated_blocks.py`). Guards of the others are copies of the template's.
* **Branches on values of masks are guards** (`value_branches.py`). transformers leaves out a mask without padding, and
  the kernels differ; so the program is for masks with padding or without, and each call computes which it is.
* **Operators are not decomposed at capture.** Inductor's decompositions run when a region is lowered. The graph between
  is the same for both backends, and `backend="eager"` runs the operators that eager mode runs, hence its bits.
* **Submodules have entries** (`entry.py`). The `forward` of a submodule is an `Entry` in its `__dict__`, which is taken
  away while a module is captured. The class and `repr` of submodules stay the user's, and `model.encoder(x)` runs a
  separate program.
* **A parameter may say itself what is gathered of it** (`extensions.py`), by FSDP2's protocol for tensor subclasses.
  Its methods are traced in the same trace as the forward. The operator `join` stands where the gather will be. What
  the methods read besides is part of the signature (`closure_variables.py`), since no guard sees it. Ranks with shorter
  shards show the methods a padded one, so that the graph has no rank in it; operators that would tell the padding apart
  are errors.
* **A parameter that is a DTensor is its local tensor** (`tensor_parallel.py`). The function that is traced takes the
  piece and makes a DTensor of it, by an autograd function that brings the gradient to the parameter's placement, as
  FSDP2 does after backward. The graph is that of one place on the tensor axis: offsets of a vocabulary are constants.
  Collectives become operators that run at once, so that passes and plans take them for compute.
* **The last sum of a gradient over the tensor axis is left to the reduction** (`take_off_last_sums`): there it is in
  the reduce dtype, and runs once for all microbatches. Where pieces have different sizes it stays, as ranks must agree
  on what they send.
* **Private names of torch are in one table** (`torch_names.py`), which is checked when the package is imported.

Pitfalls:

* DTensor keeps its plans by meshes that are equal, so a trace may name the process group of another mesh of the same
  ranks: groups are compared by ranks.
* `aten.native_dropout`, which tracing puts in place of CPU dropout, rounds differently in bfloat16
  (`eager_operators.py`).
* AOTAutograd calls the flat function twice, first without a graph. What a mode needs to know it keeps itself.
* AOTAutograd traces leaves as results of something else, and autocast keeps casts of leaves only: `leaves_stay_leaves`.
* Guards are built against the compiled module, whose units have other classes: the trace gives units the same classes,
  because a guard on a method names the place of its class in `__mro__`.
* `replaced` restores `None`: Dynamo's automatic dynamic state is None until somebody asks for it.
* Dynamo's fake floats remember the symbol that reading them gives (`item_memo`); AOTAutograd's must have the same.
"""

from graphshard.frontend.torch_names import check_names

check_names()

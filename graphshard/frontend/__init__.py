"""Capture of a module and one call as a joint ATen graph.

    module, one call --Dynamo--> torch-level graph, guards, bytecode --AOTAutograd--> joint ATen graph -> Program

* **Dynamo traces Python** (`dynamo_capture.py`), as for `torch.export.export(strict=True)`. Its guards say which later
  calls a program serves, its bytecode replays what forward does to objects.
* **AOTAutograd differentiates the torch-level graph** (`_joint_graph.py`), under full fake parameters in the compute
  dtype. So nothing is allocated, and custom backwards, hooks and checkpointed regions are in the graph.
* **A unit's boundary is a call** (`unit_boundaries.py`): its class casts inputs and results, and sends inputs through
  one node of autograd, as FSDP2's hooks do. Sums of gradients then have FSDP2's order, hence its bits.
* **Operators are not decomposed at capture.** Inductor's decompositions run when a region is lowered, and
  `backend="eager"` runs the operators of eager mode, hence its bits.
* **Submodules have entries** (`ir/submodule_entry_points.py`): their `forward` is an `EntryPoint` in their `__dict__`,
  which is taken away while a module is captured. `model.encoder(x)` runs a separate program.

Pitfalls:

* AOTAutograd calls the flat function twice, first without a graph. What a mode needs to know it keeps itself.
* AOTAutograd traces leaves as results of something else, and autocast keeps casts of leaves only: `leaves_stay_leaves`.
* Guards are built against the compiled module, whose units have other classes: the trace gives units the same classes,
  because a guard on a method names the place of its class in `__mro__`.
* `replaced` restores `None`: Dynamo's automatic dynamic state is None until it is asked for.
* Dynamo's fake floats remember the symbol that reading them gives (`item_memo`); AOTAutograd's must have the same.
"""

from graphshard.torch_compat.names import check_names

check_names("dynamo", "aot_autograd", "fake_tensors")

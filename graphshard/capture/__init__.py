"""From a module and one call to a joint ATen graph; and which captured program serves a call.

`capture.py` calls `torch.export` and AOTAutograd, `flatten.py` makes the result a function of flat tensors.
`signature.py` and `fit.py` say which calls a captured program serves. `diagnose.py` turns a failure into a message
about the user's code.

* **Operators are not decomposed at capture.** Inductor's decompositions run when a region is lowered. The graph between
  is the same for both backends, and `backend="eager"` runs the operators that eager mode runs, hence its bits.
* **Capture takes the path of eager mode** (`eager_path.py`). Hugging Face's code, when it is traced, makes an attention
  mask and repeats key and value heads. Its eager code does neither, and gradients differ in their last bit; on some
  processors in float32, too. What code outside of torch asks (`torch.compiler.is_exporting()`, whether a tensor is
  fake) is therefore answered as in eager mode; torch's own code hears the truth, since it runs the trace. Values that
  depend on no input, such as positions, are computed when they are read (`known_values.py`). A function that reads
  others is told that it is traced, in another attempt.
* **Outputs that alias an input or each other are copied at capture.** That removes the cases for which AOTAutograd has
  its wrappers, so the runtime needs none. Buffer updates are outputs that are copied back.
* **Submodules have entries** (`entry.py`). The `forward` of a submodule is an `Entry` in its `__dict__`, which is taken
  away while a module is captured. The class and `repr` of submodules stay the user's, and `model.encoder(x)` runs a
  program of its own.
* **Checkpointed regions are annotated while they are traced** (`checkpoints.py`). Every form of checkpointing goes
  through two functions and a class method of torch. These are exchanged while a module is exported, and put back. Nodes
  get `ac_graph_id` and `recompute`, which are torch's own marks. Bodies of autocast blocks are interpreted node by node
  in the joint capture, or they would lose annotation and module stack.
* **What leaves a checkpointed region is marked to be saved**, if backward needs it. Otherwise the partitioner takes
  everything behind a recomputed value as recomputable, and goes back through region after region.
* **A checkpoint in a checkpoint is part of the outer one.** The saved bytes are eager mode's; what eager mode computes
  twice runs once.
* **A program with dynamic sizes is chosen for a call by `fit.misfit`**: equal sizes, fixed sizes, strides, ranges, and
  the guards that capture and Inductor left in the shape environment. A region whose compilation added a guard is not
  shared with other programs.

Pitfalls:

* `aten.native_dropout`, which tracing puts in the place of CPU dropout, rounds differently in bfloat16: `rounding.py`.
* The joint graph of a CUDA model cannot be captured on a machine without CUDA: autograd of fake CUDA tensors needs the
  device's stream API.
* Each attempt to trace a path has a fake mode and a shape environment of its own: a failed one leaves symbols in both.
* The fake inputs given to export are of another fake mode than the parameters', and export runs in a `TracingContext`.
  It then makes symbolic inputs in the parameters' mode. Fakes of the same mode are taken as they are, with fixed sizes.
* Batch norm inside a checkpoint: eager mode updates running statistics twice, graphshard once.
"""

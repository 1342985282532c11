"""From a module and one call to a joint ATen graph; and which captured program serves a call.

`capture.py` gives AOTAutograd the module as a function of flat tensors, which is `flat.py`, and fake ones to call it
with, which `fakes.py` makes. `signature.py` and `fit.py` say which calls a captured program serves. `diagnose.py` turns
a failure into a message about the user's code.

* **The module itself is traced.** `torch.export` with the joint capture of its result, which was here before, records
  what forward computes: the backward of a custom function, a hook of a tensor, a gradient taken in forward were lost.
  AOTAutograd now calls the module, under fake parameters, so autograd does what it does in eager mode. What is left of
  `torch.export` is the format of dynamic sizes and the check of them.
* **What a program cannot keep is an error where it happens.** Modes watch every function and operator (`watch.py`,
  `substitute.py`, `known_values.py`) and raise `Untraceable` (`untraceable.py`): the traceback leads to the line.
* **FSDP2's node of autograd is at the inputs of units** (`boundaries.py`). It decides when what a unit contributes to
  the gradient of its input is added to what others contribute.
* **Operators are not decomposed at capture.** Inductor's decompositions run when a region is lowered. The graph between
  is the same for both backends, and `backend="eager"` runs the operators that eager mode runs, hence its bits.
* **Capture takes the path of eager mode** (`eager_path.py`). Hugging Face's code, when it is traced, makes an attention
  mask and repeats key and value heads. Its eager code does neither, and gradients differ in their last bit; on some
  processors in float32, too. What code outside of torch asks (`torch.compiler.is_exporting()`, whether a tensor is
  fake) is therefore answered as in eager mode; torch's own code hears the truth, since it runs the trace. Values that
  depend on no input, such as positions, are computed when they are read (`known_values.py`). A function that reads
  others is told that it is traced, in another attempt.
* **Values of inputs and buffers are asked for where nothing else helps** (`deciding.py`): how tensors were made is
  remembered as far as no parameter takes part (`origins.py`), so what forward reads can be computed of this call's
  values, and of those of later calls before they begin. Each value has a program of its own, so first all paths
  without are tried.
* **Outputs that alias an input or each other are copied** (`flat.py`). That removes the cases for which AOTAutograd has
  its wrappers, so the runtime needs none. Buffer updates are outputs that are copied back.
* **What forward reads and leaves on modules is recorded while it runs** (`attributes.py`). Attributes are looked up
  through a recorder, which hands out this run's tensors; what is there afterwards is compared with before
  (`changes.py`) and put back. Reads become what a program holds for (`witness.py`), writes are made again after each
  call. Comparing finds what intercepting would miss, such as an item that is put into a dict in a list.
  What is put back, and written again, goes around setters of the user's (`contents.py`): forward has called them.
* **One object is one tensor in the trace** (`inputs.py`, `reach.py`): given twice, or given and held by a module. Which
  are one is in the signature, and what the module holds is compared at each call.
* **Counters and lists are followed in a second run** (`numbers.py`, `growing.py`), once the first has shown that they
  change. Operators are given what is read of an input of the program, in a third run. Stand-ins are no subclasses of
  int and list, since C code reads those without asking. If anything goes wrong with them, there is a run without them,
  for the value as it is.
* **Sizes that torch finds out are checked** (`found_sizes.py`). Where a tensor whose size depends on values meets one
  of a known size, the trace takes that for granted. The program asks after each call: eager mode would have failed.
* **What `functools.cache` keeps is real** (`remembered.py`). In such a function torch's functions that are given no
  traced tensor run at once, as in eager mode, and results are constants. A traced one that is kept is an error.
* **Functions are followed to what they close over, to defaults and globals, and to attributes that their code names of
  modules and classes** (`outer.py`, `reach.py`), as hooks keep their results there.
  What code leaves that runs in backward would happen once: `backward_effects.py` makes it an error. What it reads then
  is watched (`in_backward.py`): modules hold their own tensors again, in the place of those that are traced.
* **Random numbers that are not torch's are seen twice** (`outside.py`): functions are exchanged, which knows the line,
  and states of generators are compared, which misses nothing.
  Seeds of torch's generators are refused in the same way (`seeds.py`): a program draws, and sets no states.
* **Of tensors forward is told what the signature of a call has** (`asked.py`). What is otherwise known of an input is
  another thing at each call, and what is set on it would be set on a stand-in. Settings of torch are noted where they
  are asked (`torch_settings.py`). `type(x)` cannot be intercepted, so the name `type` is another function in the
  modules of the model's classes (`type_of.py`).
* **Submodules have entries** (`entry.py`). The `forward` of a submodule is an `Entry` in its `__dict__`, which is taken
  away while a module is captured. The class and `repr` of submodules stay the user's, and `model.encoder(x)` runs a
  program of its own.
* **Checkpointed regions are annotated while they are traced** (`checkpoints.py`). Every form of checkpointing goes
  through two functions and a class method of torch. These are exchanged while a module is traced, and put back. Nodes
  get `ac_graph_id` and `recompute`, which are torch's own marks.
* **What leaves a checkpointed region is marked to be saved**, if backward needs it. Otherwise the partitioner takes
  everything behind a recomputed value as recomputable, and goes back through region after region.
* **A checkpoint in a checkpoint is part of the outer one.** The saved bytes are eager mode's; what eager mode computes
  twice runs once.
* **torch.cond is converted to a choice** (`conditionals.py`). Branches kept as graphs would concern every pass,
  the partitioner, the printer, the codec and the cost model, a region could not reach across them, and a collective
  within one would hang where ranks choose differently. Each tensor enters the branches through one node of autograd:
  without it the branch that is not taken adds zero times infinity, and sums add up in another order.
* **A parameter may say itself what is gathered of it** (`extensions.py`), by FSDP2's protocol for tensor subclasses.
  Its methods are traced before the forward, in the same trace: the function that is traced takes the tensors that the
  shard holds, and beside them a leaf that nothing reads, for the gradient. The operator `join` stands where the gather
  will be. A subclass is its attributes (`ir/subclasses.py`): `__tensor_flatten__` is not asked, as FSDP2 does not ask
  it, and torchao's forgets the scale that is set after each step. What its methods read besides is part of the
  signature (`variables.py`), since they run before anything of forward is recorded. Ranks with shorter shards show the
  methods a padded one, so that the graph has no rank in it; operators that would tell the padding apart are errors
  (`shard_operators.py`).
* **A parameter that is a DTensor is its local tensor** (`tensor_axis.py`). The function that is traced takes the piece
  and makes a DTensor of it, by an autograd function that brings the gradient to the parameter's placement, as FSDP2
  does after backward. AOTAutograd's own way with subclasses would return gradients in whatever placement they have.
  DTensor's code runs in the trace, so the graph is that of one place on the tensor axis: offsets of a vocabulary, and
  which pieces of a sequence are its own, are constants. Collectives become operators that run at once, so that passes
  and plans, which know collectives by the parameters they carry, take them for compute.
* **The last sum of a gradient over the tensor axis is left to the reduction** (`take_off_last_sums`): there it is in
  the reduce dtype, and runs once for all microbatches. One that gives each rank a piece is not cast before, as with
  FSDP2; where pieces have different sizes it stays, as ranks must agree on what they send.
* **A program with dynamic sizes is chosen for a call by `fit.misfit`**: equal sizes, fixed sizes, strides, ranges, and
  the guards that capture and Inductor left in the shape environment. Other programs do not share its regions of dynamic
  sizes: what was found of a size while one was compiled is taken for granted in those that come after it.

Pitfalls:

* DTensor keeps its plans by meshes that are equal, so a trace may name the process group of another mesh of the same
  ranks: groups are compared by ranks.
* `aten.native_dropout`, which tracing puts in the place of CPU dropout, rounds differently in bfloat16: `rounding.py`.
* Autograd asks for the streams of fake CUDA tensors. Where there is no GPU `ir/driver_internals.py` answers; torch's
  choice among attention kernels, which its builds for CPUs lack, is made in `cuda_attention.py`.
* Torch takes an operator apart where no kernel is registered for the device, and asks CUDA's hooks for cuDNN: both are
  answered by what a build of torch has, not by the tensors. `ir/cuda_internals.py` answers for builds for CPUs.
* Each attempt to trace a path has a fake mode and a shape environment of its own: a failed one leaves symbols in both.
* AOTAutograd calls the flat function twice, first without a graph. What a mode needs to know it keeps itself.
* AOTAutograd traces leaves as results of something else, and autocast keeps casts of leaves only: `leaves_stay_leaves`.
* Effects (`ForwardTokenAOTInput`) are taken out of the trace before AOTAutograd sees them.
* Tracing takes oneDNN's LSTM without a workspace, so its backward fails: `substitute.py` turns oneDNN off for it.
* AOTAutograd switches hooks of saved tensors off while it traces. Checkpointed regions switch them on: what autograd
  saves says how far eager mode runs a region again, and so which buffers backward writes (`written_again.py`), and
  what else a region leaves would be there twice (`region_effects.py`).
"""

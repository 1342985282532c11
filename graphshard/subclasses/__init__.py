"""Tensor subclasses and DTensors in a traced forward: their all-gathers, and the placements of gradients.

* **A parameter may say itself what is gathered of it** (`extensions.py`), by FSDP2's protocol for tensor subclasses.
  Its methods are traced with the forward. What they also read is part of the signature (`closure_variables.py`), since
  no guard sees it. Ranks with shorter shards show the methods a padded one, so that graphs of all ranks are equal;
  operators that would tell the padding apart are errors.
* **A parameter that is a DTensor is its local tensor** (`tensor_parallel.py`). The traced function makes a DTensor of
  the piece, and brings the gradient to the parameter's placement, as FSDP2 does after backward. The graph belongs to
  one place on the tensor axis: offsets of a vocabulary are constants. Collectives become operators that run at once,
  so that passes and plans take them for compute.
* **The last sum of a gradient over the tensor axis is left to the reduction** (`take_off_last_sums`): there it is in
  the reduce dtype, and runs once for all microbatches. Where pieces have different sizes it stays, as ranks must agree
  on what they send.

Results of a forward that are subclasses go through a program as their parts (`results.py`).

Pitfalls:

* DTensor keeps its plans by meshes that are equal, so a trace may name the process group of another mesh of the same
  ranks: groups are compared by ranks.
"""

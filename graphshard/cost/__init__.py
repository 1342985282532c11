"""Seconds and bytes of operators, collectives and copies on a machine; profiles of machines.

`kernels.py` groups operators into kernels and counts their work, `flops.py` counts multiplications, `costs.py` turns
both into seconds with a `Profile`, for the model's own collectives, too, and `workspace.py` predicts
the memory that a region allocates. Profiles are JSON files in which every number has a source.

* **Costs are generic over numbers, arrays and sympy expressions** (`scalars.py`). One function for each kernel and each
  collective serves all, so no second model must be kept in step. `maximum` and `minimum` build unevaluated Max and Min:
  comparing expressions is what makes sympy take minutes.
* **Uncertain numbers have a range** in the profile. `profile.sampled` replaces them with arrays of samples, and a
  prediction is evaluated once for all: that costs tens of milliseconds, and needs no sensitivities.
* **Products are computed in waves of tiles, and limited by power.** A tile takes 2 us in addition to its products on an
  H100, so short inner dimensions are slow. That, the speed of smaller tiles and the price of cutting an inner dimension
  are fitted to 111 measured products. The fastest product measured on a chip is slower than its tiles would allow:
  power limits it, in training more than in a benchmark. So the limit is a separate number (`sustained`), a ceiling and
  not a factor: small products do not come near it.
* **An attention's speed is of a kernel and a direction.** FlashAttention 2 reaches a third of an H100, cuDNN half.
* **Fusion by levels.** Elementwise operators and reductions are one kernel if they are connected and no operator that
  stands alone lies between. An operator moves to its users if none of them stands alone.
* **A profile's hash is of its numbers**, not of its name, sources or date.
* **On CPUs a kernel computes and then moves its bytes.** The operands of a step are not in the cache, unlike those of a
  calibrated product are.
* **Collectives use the fastest algorithm**: rings, trees of nodes for all-reduces, and the switch of an NVLink domain
  (NVLS). Steps, their seconds and the fractions of the bandwidth follow NCCL's model. Its factor for trees of medium
  sizes, down to a half, is a range here: a collective's time must be the least of straight lines in its bytes, on which
  the planner relies. PAT, for one rank in each node, is left out.
* **A network is cards for each rank**, their bandwidth, and whether traffic keeps to its rail. All ranks of a node
  communicate at the same time, so ranks of an axis between nodes have separate cards.
* **Contention is one number** of a profile. On CPUs gloo's threads take cores from the compute while a collective is
  under way, on GPUs NCCL's kernels take multiprocessors and memory bandwidth. The clocks slow regions down by it, and
  the bound grows by it times the link's work. The searches take compute as undisturbed; their results are compared with
  it.
"""

"""Seconds and bytes of operators, collectives and copies on a machine; profiles of machines.

`kernels.py` groups operators into kernels and counts what they do, `multiplications.py` counts products, `costs.py`
makes seconds of it with a `Profile`. Profiles are JSON files in which every number has a source. `workspace.py` says
what a region allocates inside.

* **Costs are generic over numbers, arrays and sympy expressions.** One function for each kernel and each collective
  serves all, so there is no second model to keep in step. `maximum` and `minimum` build unevaluated Max and Min:
  comparing expressions is what makes sympy take minutes.
* **What is not known has a range** in the profile. `samples.py` puts samples in the place of such numbers, and a
  prediction is evaluated once for all of them: that costs tens of milliseconds, and needs no sensitivities.
* **Products are computed in waves of tiles, and limited by power.** A tile takes 2 us besides its products on an H100,
  which is what makes short inner dimensions slow. That, the speed of smaller tiles and the price of cutting an inner
  dimension are fitted to 111 measured products. The largest product that was ever measured on a chip is below what its
  tiles would reach: power limits it, in training more than in a benchmark. So the limit is a number of its own
  (`sustained`), a ceiling and no factor: small products do not come near it.
* **An attention's speed is of a kernel and a direction.** FlashAttention 2 reaches a third of an H100, cuDNN half.
* **Multiplications are counted by us.** Torch's counter counts causal attention in full, and the weight gradient of
  grouped convolutions `groups` times too high. It does not know the CPU's attention. Tests compare where it is right.
* **Fusion by levels.** Elementwise operators and reductions are one kernel if they are connected and no operator that
  stands alone lies between. An operator moves to its users if nothing that stands alone uses it.
* **A profile's hash is of its numbers**, not of its name, sources or date.
* **On CPUs a kernel computes and then moves its bytes.** The operands of a step are not in the cache, as those of a
  calibrated product are.
* **Collectives by the algorithm that is fastest**: rings in steps from rank to rank, trees of nodes for all-reduces,
  and the switch of an NVLink domain (NVLS). Steps, their seconds and the shares of the bandwidth are those of NCCL's
  own model, by which it chooses. Its factor for trees of medium sizes, down to a half, is a range here: a collective's
  time must be the least of straight lines in its bytes, on which the planner relies. PAT, for one rank in each node,
  is left out.
* **A network is cards for each rank**, what they reach, and whether traffic keeps to its rail. All ranks of a node
  communicate at the same time, so those of an axis that lies between nodes have their own cards.
* **Contention is one number** of a profile. On CPUs gloo's threads take cores from the compute while a collective is
  under way, on GPUs NCCL's kernels take multiprocessors and memory bandwidth. The clocks slow regions down by it, and
  the bound grows by it times the link's work. The searches take compute as undisturbed; what they find is compared with
  it.
"""

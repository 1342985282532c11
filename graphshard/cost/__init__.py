"""Seconds and bytes of operators, collectives and copies on a machine; profiles of machines.

`kernels.py` groups operators into kernels and counts what they do, `multiplications.py` counts products, `costs.py`
makes seconds of it with a `Profile`. Profiles are JSON files in which every number has a source.

* **Costs are generic over numbers and sympy expressions.** One function for each kernel and each collective serves
  both, so there is no second model to keep in step. `maximum` and `minimum` build unevaluated Max and Min: comparing
  expressions is what makes sympy take minutes.
* **Multiplications are counted by us.** Torch's counter counts causal attention in full, and the weight gradient of
  grouped convolutions `groups` times too high. It does not know the CPU's attention. Tests compare where it is right.
* **Fusion by levels.** Elementwise operators and reductions are one kernel if they are connected and no operator that
  stands alone lies between. An operator moves to its users if nothing that stands alone uses it.
* **A profile's hash is of its numbers**, not of its name, sources or date.
* **On CPUs a kernel computes and then moves its bytes.** The operands of a step are not in the cache, as those of a
  calibrated product are.
* **Contention is one number** of a profile. On CPUs gloo's threads take cores from the compute while a collective is
  under way. The clocks slow regions down by it, and the bound grows by it times the link's work. The searches take
  compute as undisturbed; what they find is compared with it.
"""

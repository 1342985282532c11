"""The compiled module: its class, its runner, its FSDP2 methods, and the agreement of ranks.

`runner.py` runs each call by the program whose guards hold. If there is none, `program_compiler.py` finds it in the
cache or in a file, or `tracer.py` captures it.

* **Dynamo's guards choose the program of a call** (`_call_checks.py`), on the real module. The signature has what they
  do not see: modes, parameters, autocast. Programs of one signature are tried in order, so that an attribute that is
  switched back finds the old one. A joint program, which has no forward to trace, compares its inputs.
* **Divergence is checked through the rendezvous store**, not by a collective: a rank that is in another collective
  could not answer one. Only parameters and collectives are compared, so shapes of inputs may differ.
* **Ranks agree before they compile, and meet again when they have compiled.** Compilers take minutes. A rank that
  differs is found before that, and no rank launches a collective that another one's failing compiler keeps it from.
* **The first rank plans.** Costs depend on sizes, and sizes may differ between ranks. Its plan goes through the
  rendezvous store, and every rank takes it whose program has the same collectives at the same positions. A rank that
  differs plans for itself, and the agreement check says how it differs. An `InfeasibleError` goes the same way, so no
  rank waits in vain.
"""

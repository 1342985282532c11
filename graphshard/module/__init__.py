"""The compiled module that a user holds: its class, the runner behind it, its switches, and the agreement of ranks.

`sharded_module.py` is the user's class with another forward, `unit_module.py` what units and the model have of FSDP2's
`FSDPModule`. `runner.py` runs each call by the program for its signature, which `maker.py` captures and lowers if there
is none. `agreement.py` is how ranks make the same plans and find out if they did not make the same programs.

* **Dynamo's guards choose the program of a call** (`traced_guard.py`), on the real module. The signature has what they
  do not see: modes, parameters, autocast. Programs of one signature are tried in order, so that an attribute that is
  switched back finds the old one. A joint program, which has no forward to trace, compares its inputs
  (`joint_guard.py`).
* **Divergence is checked through the rendezvous store**, not by a collective: a rank that is in another collective
  could not answer one. Only parameters and what is communicated are compared, so shapes of inputs may differ.
* **Ranks agree before they compile, and meet again when they have compiled.** Compilers take minutes. Who differs
  should not have to wait for them, and nobody should launch a collective that a failing compiler keeps another from.
* **The first rank plans.** Costs depend on sizes, and sizes may differ between ranks. Its plan goes through the
  rendezvous store, and every rank takes it whose program has the same collectives at the same positions. A rank that
  differs plans for itself, and the agreement check says how it differs. An `InfeasibleError` goes the same way, so no
  rank waits in vain.
"""

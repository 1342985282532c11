"""The compiled module that a user holds: its class, the runner behind it, its switches, and the agreement of ranks.

`sharded_module.py` is the user's class with another forward. The runner captures a program for each signature that the
module is called with, and runs it. `agreement.py` is how ranks make the same plans and find out if they did not make
the same programs.

* **A guard asks for objects, not for values** (`guard.py`): a call compares identities, at 0.1 us each, and values only
  of what has contents or was replaced. Programs of one signature are tried in order, so that an attribute that is
  switched back finds the old one. Programs from files know descriptions instead of objects, and are bound anew where
  one differs.
* **Ranks number models when these first run**, not when they are compiled. So a copy on one rank only, such as an
  average of weights, does not make the others wait.
* **Models are counted for each process group**: a rank may be in several meshes.
* **Divergence is checked through the rendezvous store**, not by a collective: a rank that is in another collective
  could not answer one. Only what is communicated is compared, so shapes may differ between ranks.
* **The first rank plans.** Costs depend on sizes, and sizes may differ between ranks. Its plan goes through the
  rendezvous store, and every rank takes it whose program has the same collectives at the same positions. A rank that
  differs plans for itself, and the agreement check says how it differs. An `InfeasibleError` goes the same way, so no
  rank waits in vain.
"""

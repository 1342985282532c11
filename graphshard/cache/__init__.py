"""Programs that `compile` made, kept for the next launch of a job.

`kept.py` finds a program by the digest of its trace and of all else that it depends on, and writes one.
`surroundings.py` says what else that is: versions, machine, settings of torch, options. `entries.py` is the directory
of files, and needs no torch.

* **A stale hit would be a wrong result that nobody sees.** So each launch traces, and the digest has the whole graph.
  What cannot be written down is a reason to keep nothing.
* **Guards are those of this launch's trace.** The file has what passes and compilation made of the graph.
* **All ranks or none.** Ranks compare what they have found, and compile together if one has found something else.
"""

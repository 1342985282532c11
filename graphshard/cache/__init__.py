"""What `compile` made, kept for the next launch of a job: under which fingerprint, and when it is not.

`watching.py` says which code runs while a program is captured, as `calls.py` is told by Python and `origins.py` knows
whose it is. `walk.py` makes a digest of that code and of all that it can read, `surroundings.py` of the rest: versions,
machine, settings of torch, options. `entries.py` is the directory of files, and needs no torch. `kept.py` writes a
program there and finds one.

* **A stale hit would be a wrong result that nobody sees.** So an entry is used if everything that the capture read is
  as it was, and not written if that cannot be told. What is not understood is a reason to keep nothing.
* **A capture is a function of what it reads.** Whatever code runs is the same if the code is, and all values that it
  reads are. Which code ran is known: a capture is watched. So functions that never ran need not be followed, and those
  that did are looked up under their names at the next launch, wherever they are called from.
* **Code is compared as it is in the process**, not as it is in files: a function that was exchanged, made by a
  decorator or defined in a notebook is told apart, and a comment is not.
* **Torch, Python and what they need are compared by version and by the files of theirs that ran**, not by what their
  functions read. What else somebody puts into their modules is found by looking through them.
* **What a program itself recorded is compared, too**: reads of attributes, globals and environment variables, as when a
  file is loaded. Afterwards its guards work as those of any program.
* **Within a launch every rank captures.** One could capture for the others of its machine, if it were watched and they
  compared as the next launch does. The others would begin later than they do now, by what watching, writing, comparing
  and reading take (`benchmarks/shared_capture.py`), and what they save is time of cores that are theirs.
* **All ranks or none.** Ranks compare what they have found, and capture together if one has found something else.
"""

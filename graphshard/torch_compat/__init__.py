"""Private names of torch: only this package imports them, and a command checks them against a release.

* **A door for each part of torch** (`dynamo`, `aot_autograd`, ...) imports its private names, and knows nothing of
  graphshard.
* **`names.py` reads the imports of the doors**, and has a table of the attributes that imports do not show.
* **`inductor_settings` is apart from `inductor_compiler`**, because importing the compiler takes seconds, and a second
  launch runs kept code without it.

Differences between releases:

* torch 2.15 reduces gradients in the parameter's dtype if a policy names none, and keeps wider gradients of autograd
  (`ir/units.py`). In the first of several microbatches it adds the uses of a parameter in the reduce dtype
  (`passes/accumulate_gradients.py`), and always for a unit that is called in part (`ParamSpec.grad_dtype`).
* torch 2.15 starts checkpointed regions in another function, and attention without dropout draws no random numbers.
"""

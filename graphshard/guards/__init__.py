"""Guards that Dynamo lacks: on tensor values, and on other state that forward reads.

* **Branches on values of masks are guards** (`value_branches.py`). transformers leaves out a mask without padding, and
  the kernels differ; so the program is for masks with padding or without, and each call computes which it is.
* **What Dynamo takes for constant is looked at in each call, or refused** (`unguarded_state.py`): `id(x)`, attributes
  of classes, builtins that were replaced. The fuzzer and the tables of constructs in the tests found what it overlooks.
* **A number that changes is an input** (`changing_numbers.py`), also where Dynamo takes it for a constant: in defaults,
  globals, tuples of hooks, and indices of tensors. Torch 2.11 does not guard defaults unless a setting says so.
* **A list that forward only appends to may have any length** (`append_only_lists.py`), where Dynamo guards the length.
"""

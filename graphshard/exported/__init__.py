"""Conversion of a `torch.export` program to a module that the rest of graphshard treats like any other.

`exported_program.py` turns an `ExportedProgram`, or a `.pt2` file, into a module. `program_module.py` makes the module,
its tensors and the checks of its inputs, with code by `program_code.py`.

* **Calls of submodules are restored.** FSDP2 casts and adds up gradients where a unit is entered, so a flat graph would
  not have its bits. `torch.export.unflatten` restores calls, too, but copies every parameter, renames further calls of
  a module, and runs an interpreter that capture would have to see through.
* **Code, not an interpreter.** What is traced is plain Python that reads parameters from `self`, so guards, messages
  with lines and equal blocks work as for code that was written by hand.
* **Files are looked at before torch loads them.** `torch.export.load` unpickles and evaluates what a file says.

Pitfalls:

* Names of a tied parameter are one object in a program, and one tensor each in a file, over the same storage.
* `aten._assert_tensor_metadata` says what a dtype was at export. It is left out, because a mixed-precision policy
  changes dtypes; and torch 2.13 writes the wrong one for results of an autocast region into a file.
"""

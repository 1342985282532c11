"""The arguments of `compile`, checked once and turned into a parameter table and a pipeline.

`Options` (`options.py`) is what a user chooses, as one value; `compile`, `explain`, `export` and `load` make one each
and hand it on. What it may hold by itself is in `values.py`, what it means for parameters and where it must fit the
model and the mesh in `table.py`, what it means for passes in `passes.py`. `checks.py` is about what else `compile` is
given: model, mesh and example inputs; `meshes.py` says which axes of a mesh are for data, and which are tensor axes,
and `experts.py` which parameters lie on another mesh than the others.

* **Signatures are made of fields.** `compile` and the others take `**options: Unpack[...]`. A new option is a field, a
  key of the `TypedDict`, its check and its paragraph in the docstring of `compile`; written-out signatures would repeat
  it eight times. mypy and IDEs read the `TypedDict`, `help` the signature that `arguments.py` makes.
* **A name that there is not is an ArgumentError** that says which one may be meant; Python's own does so from 3.13 on.
"""

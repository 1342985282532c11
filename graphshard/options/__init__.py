"""The arguments of `compile`, checked once and resolved against a model and a mesh into one `CompileRequest`.

`Options` (`options.py`) is what a user chooses, as one value; `compile`, `explain`, `export` and `load` make one each.
`validate.py` checks options, inputs, the model and its parameters. `mesh_axes.py` finds the role of each mesh axis.
`resolve.py` makes the parameter table, the pipeline and the planner of them. `simulated_mesh.py` makes meshes without
machines.

* **The model is listed once.** `check_model` returns `ModelContents`: modules, parameters and buffers by name. What
  follows reads these.
* **Signatures are made of fields.** `compile` and the others take `**options: Unpack[...]`; written-out signatures
  would repeat an option eight times. mypy reads the `TypedDict`, `help` the signature that `takes_options` makes.
* **An unknown name is an ArgumentError** that says which one may be meant; Python does so from 3.13 on only.
"""

"""Programs, passes and signatures as JSON, without pickle and without importing names from a file.

A file holds the fields of dataclasses by their types (`converter.py`). A new field needs nothing here; one of a type
that no file can hold fails in `tests/codec/test_round_trip.py`. Only nodes of graphs, their values and dynamic sizes
(`graph_format.py`) are written by hand. `program_format.py` has the stages of dumps and the programs of `store/`.
`joint_export.py` converts a captured program to torch's `ExportedProgram` and back.
"""

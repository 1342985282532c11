"""Programs, passes and signatures as JSON, without pickle and without imports of what a file names.

Stages of dumps (`stage.py`) and programs of artifacts (`lowered.py`, `partitioned.py`) are dataclasses, and a file
holds their fields by their types (`converter.py`). A field that is added needs nothing here; one of a type that no file
can hold fails in `tests/codec/test_round_trip.py`. Only nodes of graphs (`graphs.py`), their values and dynamic sizes
are written by hand. `captured_graph.py` keeps what was captured while passes rewrite it, and `joint_program.py` makes
torch's `ExportedProgram` of it, which `joint_reader.py` reads. A name in a file is looked up among what this package
knows, and never imported: reading a file runs none of its code.
"""

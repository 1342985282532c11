"""Programs, passes and signatures as JSON, without pickle and without imports of what a file names.

Stages of dumps (`stage.py`) and programs of artifacts (`lowered.py`, `partitioned.py`) share the encoding of graphs
(`graphs.py`), values, sizes and passes. A name in a file is looked up among what this package knows, and never
imported: reading a file runs none of its code.
"""

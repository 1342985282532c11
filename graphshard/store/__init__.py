"""Compiled programs in files: the compile cache and artifacts have one format, one reader and one fingerprint.

`artifact_file.py` reads and writes a file, whose first line is `artifact_manifest.py`. `fingerprint.py` says what its
programs depend on, and compares it. `program_library.py` has the programs of an artifact, `program_cache.py` finds and
writes entries of the compile cache, whose directory is `cache_directory.py`. `_trace_record.py` spares a launch the
trace. `signing.py` signs a file.

* **Read once, checked, then interpreted.** The archive is in memory as a whole, so that it cannot change meanwhile.
* **Equal programs are equal files**: no dates, no times.
"""

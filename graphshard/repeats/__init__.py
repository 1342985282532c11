"""Equal blocks of a deep model: matching, capture of a few of them, and guards for all.

A trace costs less than twice as much for 126 layers as for 4. Plan and program of the others are copies of a template
(`ir/repeats.py`), and so are their guards (`repeated_blocks.py`).
"""

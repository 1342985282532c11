"""A program and its predicted timeline as one HTML page.

`content.py` is what the page shows, as data. `page.py` puts it into the template with its style and scripts: one file
that opens without a network. `trace_events.py` writes a predicted step for ui.perfetto.dev.
"""

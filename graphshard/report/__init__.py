"""A program and its predicted timeline as one HTML page."""

"""The command `graphshard`, one file for each group of subcommands.

`commands.py` has the arguments of all of them, and imports what runs one when it runs: `graphshard --help` and
`--version` do not wait for torch. Wrong arguments and unreadable files are one line on stderr and exit status 2.
"""

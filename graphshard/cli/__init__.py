"""The command `graphshard`.

`main.py` has the arguments of all subcommands and imports what runs one when it runs: `graphshard --help` and
`--version` do not wait for torch. Wrong arguments and unreadable files are one line on stderr and exit status 2.
"""

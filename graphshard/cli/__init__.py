"""The command `graphshard`, one file for each group of subcommands.

Wrong arguments and unreadable files are one line on stderr and exit status 2.
"""

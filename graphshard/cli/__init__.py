"""The command `graphshard`, one file for each group of subcommands."""

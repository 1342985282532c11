"""The compiled module that a user holds: its class, the runner behind it, its switches, and the agreement of ranks."""

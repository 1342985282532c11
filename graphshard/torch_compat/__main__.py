"""`python -m graphshard.torch_compat`: print the private names that the installed torch does not have."""

import sys

import torch

from graphshard.torch_compat.names import NAMES, TESTED, missing_names

missing = [f"{door}: {name}" for door in NAMES for name in missing_names(door)]
print(f"torch {torch.__version__} (tested: {TESTED.first} to {TESTED.last}): {len(missing)} private names are missing")
print(*missing, sep="\n", end="\n" if missing else "")
sys.exit(bool(missing))

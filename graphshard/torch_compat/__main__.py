"""`python -m graphshard.torch_compat`: print the private names that the installed torch does not have."""

import sys

import torch

from graphshard.torch_compat.names import DOORS, TESTED, missing_attributes, missing_names

missing = [f"{door}: {name}" for door in DOORS for name in missing_names(door)]
missing += [f"attributes: {name}" for name in missing_attributes()]
print(f"torch {torch.__version__} (tested: {TESTED}): {len(missing)} private names are missing")
print(*missing, sep="\n", end="\n" if missing else "")
sys.exit(bool(missing))

"""Entry point of `python -m benchmarks.gpu`, which `tests/gpu/run.sh` runs."""

import sys

from benchmarks.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())

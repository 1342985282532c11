"""`python -m graphshard` is the command `graphshard`."""

import sys

from graphshard.cli import main

sys.exit(main())

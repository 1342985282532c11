"""`python -m graphshard` is the command `graphshard`."""

import sys

from graphshard.cli.main import main

sys.exit(main())

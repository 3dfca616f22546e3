"""`python -m ggmlb`: the same as the `ggmlb` command."""

import sys

from ggmlb.cli import main

if __name__ == "__main__":
    sys.exit(main())

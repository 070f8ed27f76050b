"""`python -m fodp`: the command line, where the script `fodp` is not on the path."""

import sys

from fodp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

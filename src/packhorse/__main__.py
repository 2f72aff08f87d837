"""`python -m packhorse` is the command line, for places where scripts are not on the path."""

import sys

from packhorse.cli.start import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())

"""Lets `python -m packhorse` run the command line, where the script is not on the path."""

import sys

from packhorse.cli.start import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())

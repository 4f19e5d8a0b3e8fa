"""Compares modes: python -m maxdiffusion.compare_quality CONFIG [--modes NAME ...]"""

import sys

from maxdiffusion.cli.commands import COMPARE_QUALITY

main = COMPARE_QUALITY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

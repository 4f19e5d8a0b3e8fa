"""Measures the ratios of MagCache: python -m maxdiffusion.calibrate_cache CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import CALIBRATE

main = CALIBRATE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

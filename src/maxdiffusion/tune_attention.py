"""Finds the best block sizes: python -m maxdiffusion.tune_attention CONFIG [topology=NAME]"""

import sys

from maxdiffusion.cli.commands import TUNE

main = TUNE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Encodes training clips: python -m maxdiffusion.preprocess_wan CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import PREPROCESS

main = PREPROCESS.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

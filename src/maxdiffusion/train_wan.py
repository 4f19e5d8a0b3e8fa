"""Trains a WAN model: python -m maxdiffusion.train_wan CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import TRAIN

main = TRAIN.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

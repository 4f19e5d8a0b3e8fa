"""Trains the WAN autoencoder: python -m maxdiffusion.train_wan_vae CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import TRAIN_VAE

main = TRAIN_VAE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

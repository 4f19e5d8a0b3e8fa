"""Prints where the time of profiled steps went: python -m maxdiffusion.read_profile FOLDER"""

import sys

from maxdiffusion.cli.commands import READ_PROFILE

main = READ_PROFILE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

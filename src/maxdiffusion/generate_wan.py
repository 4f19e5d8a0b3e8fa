"""Makes videos: python -m maxdiffusion.generate_wan CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import GENERATE

main = GENERATE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Makes characters move: python -m maxdiffusion.generate_wan_animate CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import ANIMATE

main = ANIMATE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""generate_wan where gs:// is a folder of this machine: python in_buckets.py CONFIG.yml ..."""

import sys

from object_storage import use_buckets

from maxdiffusion.generate_wan import main

if __name__ == "__main__":
    use_buckets()
    sys.exit(main(sys.argv[1:]))

"""A disk that is full: for a while files of this process cannot grow beyond some bytes."""

import contextlib
import resource


@contextlib.contextmanager
def files_limited_to(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""A disk that is full: files of this process cannot grow beyond some bytes."""

import contextlib
import resource


def limit_files(size):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


@contextlib.contextmanager
def files_limited_to(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit_files(size)
    try:
        yield
    finally:
        limit_files(before)

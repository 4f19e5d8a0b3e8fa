"""A last word for a process that native code aborts.

When the first process of a job dies, the service that joined the others dies with it, and jax ends
them from a thread of its own by abort(): no Python runs any more, and what is printed names nobody.
The signal of abort() is heard here, on that thread, before the process ends.
"""

import ctypes
import signal
from collections.abc import Callable
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
# What C calls must live as long as the process does.
_kept: list[Any] = []


def before_abort(speak: Callable[[], None]) -> None:
    """Calls `speak` when this process aborts; if it returns, the process aborts after all.

    Handlers of Python's own run on the main thread, later, and after abort() there is no later.
    """
    handler = _HANDLER(lambda _: speak())
    _kept.append(handler)
    setter = ctypes.CDLL(None).signal
    setter.argtypes, setter.restype = (ctypes.c_int, _HANDLER), ctypes.c_void_p
    setter(signal.SIGABRT, handler)

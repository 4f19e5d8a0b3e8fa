"""A coordination service in memory, for several processes that are threads of a test."""

import threading

import jax

from maxdiffusion.distributed.coordination import Service


class MemoryClient:
    """Has the methods of jax's client that `Service` calls."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key, text, allow_overwrite=False):
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = text
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, folder):
        with self._changed:
            return [(key, text) for key, text in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, key):
        with self._changed:
            self.values.pop(key, None)


def services(client, count):
    """Returns the service as each of `count` processes sees it."""
    return [Service(client, index=index, count=count) for index in range(count)]

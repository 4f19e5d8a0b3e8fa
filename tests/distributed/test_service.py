"""The key-value store of a job, and what is said where jax lacks it."""

import sys

import jax
import pytest

from maxdiffusion.distributed.coordination import (
    NoAnswer,
    UnsupportedJax,
    is_multiprocess,
    this_process,
)
from maxdiffusion.distributed.initialize import ClusterConfig, Timeouts, detect_cluster
from tests.distributed.memory_service import MemoryClient, services


def test_values_are_published_once_or_updated():
    (service,) = services(MemoryClient(), 1)
    service.publish("a/0", "first")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ALREADY_EXISTS"):
        service.publish("a/0", "second")
    service.update("a/0", "third")
    service.publish("b", "other")
    assert service.receive("a/0", sender=0, timeout=1) == "third"
    assert service.entries("a") == {"0": "third"}
    service.delete("a/0")
    assert service.entries("a") == {}


def test_a_process_that_does_not_answer_is_named():
    service, _ = services(MemoryClient(), 2)
    with pytest.raises(NoAnswer, match=r"process 1 did not answer for 0\.01 s"):
        service.receive("a/1", sender=1, timeout=0.01)


def test_other_errors_of_the_service_are_not_hidden():
    class Broken(MemoryClient):
        def blocking_key_value_get(self, key, milliseconds):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost")

    (service,) = services(Broken(), 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        service.receive("a", sender=0, timeout=5)


def test_a_process_alone_has_index_zero():
    assert not is_multiprocess()
    assert this_process().index == 0


def test_a_jax_without_its_internals_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.clusters", None)
    with pytest.raises(UnsupportedJax, match=rf"jax {jax.__version__} has no .*ClusterEnv"):
        detect_cluster(ClusterConfig(), timeouts=Timeouts())

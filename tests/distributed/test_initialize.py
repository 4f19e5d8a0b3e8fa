"""The process group of a job: from the config, the environment, or detected by jax."""

import socket

import pytest
from jax._src.clusters import cloud_tpu_cluster

from maxdiffusion.distributed.initialize import (
    CannotJoin,
    ClusterConfig,
    ProcessGroup,
    Timeouts,
    configured_cluster,
    detect_cluster,
    join,
)
from maxdiffusion.errors import ProblemsFound

TIMEOUTS = Timeouts(join=5)
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}

JOBSET = {  # what GKE sets on the second host of the second of two slices
    "TPU_WORKER_HOSTNAMES": "wan-slice-1-0.wan,wan-slice-1-1.wan",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in (*SLURM, "JAX_COORDINATOR_ADDRESS", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def found(address="", processes=None, process=None, **environment):
    config = ClusterConfig(address=address or None, processes=processes, process=process)
    return detect_cluster(configured_cluster(config, environment), timeouts=TIMEOUTS)


def test_a_machine_by_itself_runs_alone():
    assert found() is None
    assert found(processes=1) is None
    assert found("host:1234", 1, 0) is None


def test_the_config_overrides_the_environment():
    variables = {
        "JAX_COORDINATOR_ADDRESS": "other:1",
        "JAX_NUM_PROCESSES": "8",
        "JAX_PROCESS_ID": "5",
    }
    assert found(**variables) == ProcessGroup(address="other:1", processes=8, process=5)
    assert found("host:2", process=3, **variables) == ProcessGroup(
        address="host:2", processes=8, process=3
    )


def test_slurm_is_found_and_may_be_corrected(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert found() == ProcessGroup(address="node001:61441", processes=4, process=2)
    assert found("host:9") == ProcessGroup(address="host:9", processes=4, process=2)


def test_slices_of_a_gke_jobset_are_found(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for name, value in JOBSET.items():
        monkeypatch.setenv(name, value)
    assert found() == ProcessGroup(address="localhost:8482", processes=4, process=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("host:1", None, None), ["jax_num_processes=None", "jax_process_id=None"]),
        (("", 2, 0), ["jax_coordinator_address=None: a job of several processes needs it"]),
        (("host", 2, 0), ["jax_coordinator_address='host': must be host:port"]),
        (("host:99999", 2, 0), ["'host:99999': must be host:port, with a port from 1 to 65535"]),
        ((":1234", 2, 0), ["jax_coordinator_address=':1234': must be host:port"]),
        (("host:1", 2, 2), ["jax_process_id=2: must be below jax_num_processes=2"]),
        (("host:1", 2, -1), ["jax_process_id=-1: must be below jax_num_processes=2"]),
        (("host:1", 0, 0), ["jax_num_processes=0: must be at least 1"]),
    ],
)
def test_what_is_missing_or_wrong_is_reported_with_its_field(arguments, words):
    with pytest.raises(ProblemsFound) as caught:
        found(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ProblemsFound, match="JAX_PROCESS_ID='two': must be a whole number"):
        found("host:1", 2, JAX_PROCESS_ID="two")


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_in_use_is_refused(shared):
    with socket.socket() as other:
        # The service of another job shares its port, and would take in processes of this one.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        group = ProcessGroup(address=f"localhost:{port}", processes=2, process=0)
        with pytest.raises(CannotJoin, match=f"cannot listen at localhost:{port} on .* in use"):
            join(group, TIMEOUTS)

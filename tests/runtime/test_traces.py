"""Traces of real programs, read back by their scopes."""

import jax
import jax.numpy as jnp
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.timing import ProfilePlan, Profiler
from maxdiffusion.runtime.traces import HostProfile, _on_device, read_profiles, scope_of, table

pytestmark = pytest.mark.slow


@jax.jit
def network(x, w):
    def layer(carry, _):
        with jax.named_scope("attention"):
            with jax.named_scope("qkv"):
                carry = carry @ w
            with jax.named_scope("rope"):
                carry = jnp.sin(carry) + jnp.cos(2 * carry)
        return carry, None

    with jax.named_scope("blocks"):
        return jax.lax.scan(layer, x, length=3)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two steps of a network with large products, profiled as two hosts would."""
    folder = tmp_path_factory.mktemp("profile")
    arrays = jnp.ones((512, 512)), jnp.ones((512, 512)) / 512
    network(*arrays).block_until_ready()
    profiler = Profiler(ProfilePlan(folder=str(folder), skip=0, steps=2))
    for step in range(2):
        with profiler.step(), jax.profiler.StepTraceAnnotation("denoise", step_num=step):
            network(*arrays).block_until_ready()
    return folder


def test_seconds_go_to_the_scopes_they_were_spent_in(folder):
    (host,) = read_profiles(folder)
    assert (host.host, host.steps, host.devices) == ("host_0", 2, 1)
    assert host.scopes["blocks/attention/qkv"] > 0
    assert host.scopes["blocks/attention/rope"] > 0
    named = sum(seconds for scope, seconds in host.scopes.items() if scope.startswith("blocks"))
    # The loop holds its operations; counted beside them it would double the sum.
    assert named == pytest.approx(host.busy, rel=0.2)
    assert host.busy <= 1.1 * host.step_seconds


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ProblemsFound, match="contains no host_N folders"):
        read_profiles(tmp_path)


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("jit(step)/blocks/while/body/closed_call/ffn/mlp/dot_general", "blocks/ffn/mlp"),
        (
            "jit(step)/blocks/while/body/self_attention/shard_map/kernel/jit(_where)/select_n",
            "blocks/self_attention/kernel",
        ),
        ("jit(step)/jvp(blocks)/while/body/ffn/dot_general", "blocks/ffn"),
        ("jit(step)/transpose(jvp(blocks))/while/body/ffn/dot_general", "backward/blocks/ffn"),
        ("jit(step)/add", "(no scope)"),
        ("", "(no scope)"),
    ],
)
def test_the_scopes_of_a_path(path, scope):
    assert scope_of(path) == scope


def test_operations_of_a_tpu_bring_their_paths():
    path = "jit(denoise_step)/blocks/while/body/ffn/mlp/dot_general:"
    fusion = "%fusion.7 = bf16[8,128]{1,0:T(8,128)} fusion(bf16[8,128] %a), kind=kOutput"
    loop = "%while.1 = (s32[], bf16[8]{0}) while((s32[], bf16[8]{0}) %tuple), body=%body"
    assert _on_device("XLA Ops", fusion, {"tf_op": path}) == path
    assert scope_of(path) == "blocks/ffn/mlp"
    assert _on_device("XLA Ops", loop, {"tf_op": path}) is None
    assert _on_device("Async XLA Ops", fusion, {"tf_op": path}) is None


def host(name: str, **scopes: float) -> HostProfile:
    return HostProfile(
        host=name,
        steps=3,
        devices=4,
        step_seconds=0.5,
        scopes={scope.replace("__", "/"): seconds for scope, seconds in scopes.items()},
    )


def test_hosts_stand_side_by_side_and_one_that_waits_is_not_the_slowest():
    waiting = host("host_0", blocks__ffn__mlp=0.1, blocks__self_attention__collective=0.3)
    working = host("host_1", blocks__ffn__mlp=0.2, blocks__self_attention__collective=0.1)
    lines = table([waiting, working]).splitlines()
    assert lines[0].split()[-2:] == ["host_0", "host_1"]
    assert lines[2].split() == ["blocks/self_attention/collective", "300.000", "100.000"]
    assert lines[3].split() == ["blocks/ffn/mlp", "100.000", "200.000"]
    assert lines[-1] == (
        "3 steps on 8 devices; slowest host: host_1, 200.000 ms of a step outside collectives"
    )


def test_deeper_scopes_are_rolled_up():
    text = table([host("host_0", a__b__c__d=0.1, a__b__c__e=0.2)])
    assert any(line.split() == ["a/b/c", "300.000"] for line in text.splitlines())

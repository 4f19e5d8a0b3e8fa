"""Weights lie whole where they fit and are spread where not, by arithmetic on HBM."""

from types import SimpleNamespace

import pytest

from maxdiffusion.commands.weight_placement import settle_weights, with_placement
from maxdiffusion.config.loading import read_config
from maxdiffusion.preflight.released import find_spec

CONFIG = "configs/base_wan_27b.yml"


def devices(kind, count):
    return [SimpleNamespace(device_kind=kind, slice_index=0, platform="tpu")] * count


@pytest.mark.parametrize(
    ("kind", "count", "chosen", "reason"),
    [
        ("TPU7x", 8, "replicate", "GiB of 90.2"),
        ("TPU v6 lite", 8, "shard", "more than 30.1; spread over 8 devices"),
        ("cpu", 8, "replicate", ""),
    ],
)
def test_auto_keeps_weights_whole_where_both_experts_fit(kind, count, chosen, reason):
    config = read_config([CONFIG]).config
    spec = find_spec(config.pretrained_model_name_or_path)
    settled, why = settle_weights(config, spec, devices(kind, count))
    assert settled.weight_placement == chosen
    assert reason in " ".join(why)


def test_a_stated_placement_is_kept():
    config = with_placement(read_config([CONFIG]).config, "shard")
    assert settle_weights(config, None, devices("TPU7x", 8)) == (config, ())

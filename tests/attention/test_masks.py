"""Which keys count is decided by global position."""

import jax.numpy as jnp
import numpy as np

from maxdiffusion.attention.problem import KVMask, LocalKVMask


def test_only_the_last_shards_hold_padding():
    keys = KVMask(true_length=9, padded_length=16)
    lengths = [int(keys.shard(jnp.asarray(i), 4).length) for i in range(4)]
    assert lengths == [4, 4, 1, 0]


def test_without_padding_no_length_is_needed():
    keys = KVMask(true_length=16, padded_length=16)
    assert keys.whole().length is None
    assert keys.shard(jnp.asarray(3), 4).length is None


def test_a_shard_takes_its_own_columns_of_the_mask():
    mask = jnp.asarray(np.random.default_rng(0).random((2, 16)) < 0.5)
    shard = KVMask(true_length=9, padded_length=16, mask=mask).shard(jnp.asarray(2), 4)
    wanted = mask[:, 8:12] & (jnp.arange(8, 12) < 9)[None]
    np.testing.assert_array_equal(shard.valid(2, 4), wanted)


def test_every_key_counts_unless_something_says_otherwise():
    assert LocalKVMask().valid(2, 8) is None

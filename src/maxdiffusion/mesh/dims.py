"""Alphabet of array dimensions in signatures (`Float[Array, "B S N H"]`) and suffixes (`q_BSNH`).

A symbol has one meaning in the whole package. A test reads every annotation of `src` and accepts
the symbols of `ALPHABET` alone; the jaxtyping hook of the test run checks the sizes.

Sequences and heads
    B  batch                       S  query or video tokens      T  key/value or text tokens
    N  query heads                 K  key/value heads            H  head features
    R  rotary pairs, H / 2         G  folded (batch, head)       J  head slots of a layout
    U  blocks of an all-to-all
Features
    D  of a model, or of heads     M  inside an MLP              E  of a text
       side by side                I  a linear map takes         O  a linear map returns
    P  values of a patch           A  modulation vectors         W  frequencies of a time
    V  vocabulary                  L  layers                     Q  noise levels of a loss
Videos
    F  frames                      Y  rows                       X  columns
    C  channels                    Z  moments, 2 per channel
    f, y, x  frames, rows, columns that a layer returns where it changes them
    kf, ky, kx  taps of a convolution
    cached  frames in a convolution's cache

Longer names are used in one file each: `B_guided` (conditional and unconditional batch), `blocks`
(key blocks of a kernel), `buckets` (of relative positions), `shards` (of queries), `strips` (of
rows).

An *axis* belongs to a mesh, a *dimension* to an array; `maxdiffusion.mesh` names the axes.
"""

ALPHABET = frozenset("BSTNKHRGJUDMEIOPAWVLQFYXCZfyx") | {
    "kf",
    "ky",
    "kx",
    "cached",
    "B_guided",
    "blocks",
    "buckets",
    "shards",
    "strips",
}

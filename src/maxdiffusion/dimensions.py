"""The alphabet of dimensions, in signatures (`Float[Array, "B S N H"]`) and suffixes (`q_BSNH`).

    B  batch                     S  query tokens          T  key tokens or text tokens
    N  heads                     H  head width            D  model width
    M  width inside an MLP       E  text embedding width  L  layers
    F  frames                    Y  rows of a frame       X  columns of a frame
    C  channels                  V  vocabulary            K  bins, taps or other small counts

Words for the same in sharding: batch, sequence, heads, model, mlp (see `maxdiffusion.mesh.layout`).
An *axis* belongs to the mesh, a *dimension* to an array.
"""

ALPHABET = frozenset("BSTNHDMELFYXCVK")

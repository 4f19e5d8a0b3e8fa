"""cuDNN's attention on a GPU."""

from collections.abc import Sequence
from typing import Any

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.kernel import DeviceKernel, Tokens
from maxdiffusion.kernels.cudnn import HEAD_DIM_MULTIPLE, LARGEST_HEAD_DIM, cudnn_attention
from maxdiffusion.runtime.problems import Problem


class CudnnKernel(DeviceKernel):
    """Fused attention of the cuDNN library, through jax."""

    title = "cuDNN"
    differentiable = True

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""
        found = []
        if self.site.platform not in ("gpu", "cuda"):
            found.append(
                Problem(
                    name="device",
                    value=self.site.platform,
                    rule="cuDNN attention runs on NVIDIA GPUs only",
                    remedy="Use flash or a ulysses/ring name on TPUs, dot_product on CPUs",
                )
            )
        if self.site.dtype.name != "bfloat16":
            found.append(
                Problem(
                    name="dtype",
                    value=self.site.dtype.name,
                    rule="cuDNN attention computes in 16 bits",
                    remedy="Use activations_dtype: bfloat16",
                )
            )
        width = self.site.head_dim
        if width % HEAD_DIM_MULTIPLE or width > LARGEST_HEAD_DIM:
            found.append(
                Problem(
                    name="head_dim",
                    value=width,
                    rule=f"a multiple of {HEAD_DIM_MULTIPLE} up to {LARGEST_HEAD_DIM}",
                    remedy="Use dot_product",
                )
            )
        return found

    def attend(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Tokens:
        """Attention over all keys."""
        valid = keys.valid(k.shape[0], k.shape[1])
        return cudnn_attention(q, k, v, scale=self.site.scale, valid=valid)

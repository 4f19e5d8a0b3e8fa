"""From a name to a plan, or to a refusal with every reason."""

import difflib
from dataclasses import dataclass

from jax.sharding import AxisType, Mesh

from maxdiffusion.attention.exchanges import ByXla, Exchange, Stay
from maxdiffusion.attention.geometry import Geometry, mesh_shape
from maxdiffusion.attention.modes import ATTENTION_NAMES, DOT_PRODUCT, MODES, Mode
from maxdiffusion.attention.on_device import DeviceKernel, KernelSite
from maxdiffusion.attention.options import LANES, AttentionOptions
from maxdiffusion.attention.plan import AttentionPlan
from maxdiffusion.attention.problem import AttentionProblem
from maxdiffusion.attention.refusal import UnsupportedAttention
from maxdiffusion.runtime.problems import Problem


@dataclass(frozen=True, kw_only=True)
class BlockAttention:
    """The two attentions of a transformer block: over its own tokens, and over text."""

    self_attention: AttentionPlan
    cross_attention: AttentionPlan

    def describe(self) -> str:
        """Both plans in words."""
        return (
            f"self-attention: {self.self_attention.describe()}\n"
            f"cross-attention: {self.cross_attention.describe()}"
        )


def plan_attention(
    name: str, problem: AttentionProblem, mesh: Mesh, options: AttentionOptions | None = None
) -> AttentionPlan:
    """The plan of `name` for tokens that attend to tokens of the same split sequence."""
    options = options or AttentionOptions()
    runs, note = _shortness(name, problem, options)
    geometry = Geometry(problem=problem, shape=mesh_shape(mesh))
    exchange = MODES[runs].exchange(geometry, options.ulysses_attention_chunks)
    return _planned(name, runs, note, geometry, mesh, exchange, options)


def plan_cross_attention(
    name: str, problem: AttentionProblem, mesh: Mesh, options: AttentionOptions | None = None
) -> AttentionPlan:
    """The plan of `name` for split tokens that attend to text, which every device has whole."""
    options = options or AttentionOptions()
    runs, note = _shortness(name, problem, options)
    geometry = Geometry(problem=problem, shape=mesh_shape(mesh), shared_keys=True)
    exchange = ByXla() if runs == DOT_PRODUCT else Stay()
    return _planned(name, runs, note, geometry, mesh, exchange, options)


def with_gradient(plan: AttentionPlan) -> AttentionPlan:
    """The plan, if it can be trained through; raises UnsupportedAttention with names that can."""
    if plan.kernel.differentiable:
        return plan
    trained = ", ".join(name for name, mode in MODES.items() if mode.kernel.differentiable)
    forward_only = Problem(
        name="attention",
        value=plan.name,
        rule=f"{plan.kernel.title} has no gradient",
        remedy=f"Train with one of {trained}",
    )
    raise UnsupportedAttention(plan.name, [forward_only])


def _mode(name: str) -> Mode:
    if name in MODES:
        return MODES[name]
    near = difflib.get_close_matches(name, ATTENTION_NAMES, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    unknown = Problem(
        name="attention",
        value=name,
        rule="no attention has this name",
        remedy=f"{hint}The names are {', '.join(ATTENTION_NAMES)}",
    )
    raise UnsupportedAttention(name, [unknown])


def _shortness(name: str, problem: AttentionProblem, options: AttentionOptions) -> tuple[str, str]:
    """The name that runs, and what `flash_min_seq_length` has to do with it, if anything."""
    mode, limit = _mode(name), options.flash_min_seq_length
    shortest = min(problem.q_len, problem.kv_len)
    if shortest >= limit or name == DOT_PRODUCT:
        return name, ""
    note = f"{shortest} tokens are fewer than flash_min_seq_length={limit}"
    if mode.gives_way:
        return DOT_PRODUCT, note
    return name, f"{note}, to which this name is not held"


def _planned(
    name: str,
    runs: str,
    note: str,
    geometry: Geometry,
    mesh: Mesh,
    exchange: Exchange | ByXla,
    options: AttentionOptions,
) -> AttentionPlan:
    problem = geometry.problem
    sizes = exchange.kernel_sizes(geometry)
    device = mesh.devices.flat[0]
    site = KernelSite(
        sizes=sizes,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        scale=problem.scale,
        ring=geometry.padded_kv_len // sizes.kv_len,
        platform=device.platform,
        device_kind=device.device_kind,
        options=options,
    )
    mode = MODES[runs]
    kernel = (mode.cross if geometry.shared_keys else mode.kernel)(site)
    problems = [*geometry.problems(), *kernel.limits()]
    if problems:
        raise UnsupportedAttention(name, problems)
    return AttentionPlan(
        name=name,
        runs=runs,
        note=note,
        geometry=geometry,
        mesh=mesh,
        exchange=exchange,
        kernel=kernel,
        fused=_fuses(mesh, geometry, kernel),
    )


def _fuses(mesh: Mesh, geometry: Geometry, kernel: DeviceKernel) -> bool:
    """Whether norms and rotations can be done by our kernel that moves heads.

    It knows no gradient, sees all heads of a token at once, as many of keys as of queries, and
    takes heads of whole lanes.
    """
    return (
        kernel.site.platform == "tpu"
        and not kernel.differentiable
        and geometry.shape.tensor == 1
        and geometry.problem.heads_per_key_head == 1
        and kernel.site.head_dim % LANES == 0
        and AxisType.Explicit not in mesh.axis_types
    )

"""Resolves the axis sizes of a config to the shape of the mesh.

    AxisSizes (-1: fill in, None: not stated)
      -> fill in the one open size, within a slice (ici) and across slices (dcn)
      -> split the context into ring x ulysses
      -> MeshSplit

Every check raises `ProblemsFound`; `resolve` collects them.
"""

import math
from dataclasses import dataclass

from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.mesh.mesh import MeshShape

FILL_IN = -1


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Requested sizes over one kind of link; -1 is filled in, None is not stated.

    `context` is ring x ulysses. If it is not stated, it takes the remaining devices.
    """

    data: int = 1
    fsdp: int = 1
    context: int | None = None
    ring: int | None = None
    ulysses: int | None = None
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class MeshRequest:
    """Requested sizes within a slice (ici) and across slices (dcn), and the context split.

    `ulysses_shards` is the part of the whole context that is split by heads; -1 leaves it open.
    """

    ici: AxisSizes = AxisSizes()
    dcn: AxisSizes = AxisSizes()
    ulysses_shards: int = FILL_IN


@dataclass(frozen=True, kw_only=True)
class MeshSplit:
    """The shapes within a slice and across slices. Their product, axis by axis, is the mesh."""

    ici: MeshShape
    dcn: MeshShape

    @property
    def shape(self) -> MeshShape:
        """Returns the shape of the whole mesh."""
        products = [a * b for a, b in zip(self.ici.sizes, self.dcn.sizes, strict=True)]
        data, fsdp, ring, ulysses, tensor = products
        return MeshShape(data=data, fsdp=fsdp, ring=ring, ulysses=ulysses, tensor=tensor)


def resolve(
    request: MeshRequest, *, devices: int, slices: int = 1, heads: int | None = None
) -> MeshSplit:
    """Returns the shapes for `devices` in `slices`. Raises ProblemsFound with all problems.

    If no field states the split of the context, ulysses gets as much of it as the heads allow.
    """
    if devices % slices:
        rule = f"must be a multiple of the {slices} slices"
        problem = Problem(name="devices", value=devices, rule=rule, remedy="Use whole slices")
        raise ProblemsFound([problem])
    problems = Collector()
    within = Links(prefix="ici", noun="devices in a slice", total=devices // slices)
    across = Links(prefix="dcn", noun="slices", total=slices)
    with problems:
        ici = within.fill(request.ici)
    with problems:
        dcn = across.fill(request.dcn)
    problems.raise_if_any()

    # Ring hops overlap with compute, so slow links between slices carry a ring unless stated.
    outer_stated = ContextSplit(ring=request.dcn.ring, ulysses=request.dcn.ulysses or 1)
    outer = outer_stated.completed(dcn.context)
    tensor = dcn.tensor * ici.tensor
    ulysses = _inner_ulysses(request, ici.context, outer=outer.ulysses, tensor=tensor, heads=heads)
    inner_stated = ContextSplit(ring=request.ici.ring, ulysses=ulysses)
    inner = inner_stated.completed(ici.context)
    with problems:
        across.check_split(outer_stated, dcn.context)
    with problems:
        _check_shards_divide(request, ici.context, outer.ulysses)
        within.check_split(inner_stated, ici.context)
    problems.raise_if_any()
    _check_shards_agree(request, inner.ulysses * outer.ulysses)
    return MeshSplit(ici=ici.shape(inner), dcn=dcn.shape(outer))


# Sizes


@dataclass(frozen=True, kw_only=True)
class RingUlysses:
    """A context split into ring x ulysses."""

    ring: int
    ulysses: int


@dataclass(frozen=True, kw_only=True)
class FilledSizes:
    """Sizes over one kind of link, before the context is split."""

    data: int
    fsdp: int
    context: int
    tensor: int

    def shape(self, split: RingUlysses) -> MeshShape:
        """Returns the mesh shape with the context split."""
        return MeshShape(
            data=self.data,
            fsdp=self.fsdp,
            ring=split.ring,
            ulysses=split.ulysses,
            tensor=self.tensor,
        )


@dataclass(frozen=True, kw_only=True)
class Links:
    """One kind of link: the prefix of its config fields, and the number of its members."""

    prefix: str
    noun: str
    total: int

    def fill(self, sizes: AxisSizes) -> FilledSizes:
        """Fills in the open size. Raises ProblemsFound if the product is not the total."""
        stated = _stated_sizes(sizes)
        for axis, size in stated.items():
            if size < 1 and size != FILL_IN:
                rule = "sizes are whole numbers from 1, or -1 to fill in"
                raise ProblemsFound([Problem(name=self.field(axis), value=size, rule=rule)])
        open_axes = [axis for axis, size in stated.items() if size == FILL_IN]
        if sizes.ring == sizes.ulysses == FILL_IN:
            open_axes = ["ring", "ulysses"]
        if len(open_axes) > 1:
            raise self._several_open(open_axes)
        known = math.prod(size for size in stated.values() if size != FILL_IN)
        if open_axes and self.total % known == 0:
            stated[open_axes[0]] = self.total // known
        elif known != self.total:
            raise self._wrong_product(stated, known)
        return FilledSizes(**stated)

    def field(self, axis: str) -> str:
        """Returns the config field of an axis."""
        return f"{self.prefix}_{axis}_parallelism"

    def check_split(self, stated: "ContextSplit", context: int) -> None:
        """Raises ProblemsFound if the stated sizes do not divide the context."""
        split = stated.completed(context)
        if split.ring * split.ulysses != context:
            raise ProblemsFound(
                [
                    Problem(
                        name=self.field("context"),
                        value=str(stated),
                        rule=f"ring x ulysses must be the context of {context}",
                        remedy=f"Leave {self.field('context')} out, or one of ring and ulysses",
                    )
                ]
            )

    def _several_open(self, axes: list[str]) -> ProblemsFound:
        names = " and ".join(map(self.field, axes))
        rule = f"only one size can be filled in, but {names} are open"
        remedy = "Give numbers to all but one of them"
        name = self.field(axes[0])
        return ProblemsFound([Problem(name=name, value=FILL_IN, rule=rule, remedy=remedy)])

    def _wrong_product(self, stated: dict[str, int], known: int) -> ProblemsFound:
        shown = ", ".join(f"{axis}={size}" for axis, size in stated.items())
        rule = f"their product is {known}, but the number of {self.noun} is {self.total}"
        others = known // stated["context"] if stated["context"] > 0 else known
        remedy = f"Choose sizes whose product is {self.total}"
        if self.total % others == 0:
            remedy += f", for example {self.field('context')}={self.total // others}"
        name = self.field("*")
        return ProblemsFound([Problem(name=name, value=shown, rule=rule, remedy=remedy)])


def _stated_sizes(sizes: AxisSizes) -> dict[str, int]:
    """Returns the four sizes. A context that is not stated is open unless another size is."""
    parts = [size for size in (sizes.ring, sizes.ulysses) if size is not None]
    product = math.prod(parts) if len(parts) == 2 and FILL_IN not in parts else None
    context = sizes.context if sizes.context not in (None, FILL_IN) else product
    if context is None:
        stated_open = sizes.context == FILL_IN or FILL_IN in parts
        other_open = FILL_IN in (sizes.data, sizes.fsdp, sizes.tensor)
        context = math.prod(parts) if other_open and not stated_open else FILL_IN
    return {"data": sizes.data, "fsdp": sizes.fsdp, "context": context, "tensor": sizes.tensor}


# The split of the context


@dataclass(frozen=True, kw_only=True)
class ContextSplit:
    """Stated sizes of ring and ulysses; None or -1 for what follows from the context."""

    ring: int | None
    ulysses: int | None

    def __str__(self) -> str:
        sizes = (("ring", self.ring), ("ulysses", self.ulysses))
        return ", ".join(f"{axis}={size}" for axis, size in sizes if size not in (None, FILL_IN))

    def completed(self, context: int) -> RingUlysses:
        """Returns both sizes. Their product is the context only if the stated ones divide it."""
        ring = None if self.ring == FILL_IN else self.ring
        ulysses = None if self.ulysses == FILL_IN else self.ulysses
        if ring is None:
            ring = max(1, context // (ulysses or 1))
        if ulysses is None:
            ulysses = max(1, context // ring)
        return RingUlysses(ring=ring, ulysses=ulysses)


def _inner_ulysses(
    request: MeshRequest, context: int, *, outer: int, tensor: int, heads: int | None
) -> int | None:
    """Returns the ulysses size within a slice, or None if it follows from the ring size."""
    if request.ici.ulysses not in (None, FILL_IN):
        return request.ici.ulysses
    if request.ulysses_shards != FILL_IN:
        return max(1, request.ulysses_shards // outer)
    if request.ici.ring not in (None, FILL_IN) or request.ici.ulysses == FILL_IN:
        return None
    if heads is None or heads % (tensor * outer):
        return context
    return math.gcd(context, heads // (tensor * outer))


def _check_shards_divide(request: MeshRequest, context: int, outer: int) -> None:
    """Raises ProblemsFound if `ulysses_shards` decides the split and does not divide it."""
    shards = request.ulysses_shards
    if shards == FILL_IN or request.ici.ulysses not in (None, FILL_IN):
        return
    if shards % outer or context % (shards // outer or 1):
        fitting = ", ".join(str(outer * n) for n in range(1, context + 1) if context % n == 0)
        rule = f"must divide the context of {context * outer} devices"
        remedy = f"Use one of {fitting}"
        raise ProblemsFound(
            [Problem(name="ulysses_shards", value=shards, rule=rule, remedy=remedy)]
        )


def _check_shards_agree(request: MeshRequest, ulysses: int) -> None:
    """Raises ProblemsFound if `ulysses_shards` is not the ulysses size of the mesh."""
    if request.ulysses_shards not in (FILL_IN, ulysses):
        rule = f"contradicts the ulysses size {ulysses} of the mesh"
        remedy = "Leave out ulysses_shards or the ring and ulysses sizes"
        value = request.ulysses_shards
        raise ProblemsFound([Problem(name="ulysses_shards", value=value, rule=rule, remedy=remedy)])

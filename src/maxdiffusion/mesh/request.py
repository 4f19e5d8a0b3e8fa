"""From the sizes that a person asks for to the shape of the mesh, or to all that is wrong."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxdiffusion.mesh.axes import MeshShape
from maxdiffusion.runtime.problems import Problem, ProblemsFound

FILL_IN = -1


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Sizes over one kind of link; -1 is filled in, None is not stated.

    `context` is ring x ulysses. Where it is not stated it takes the devices that are left over.
    """

    data: int = 1
    fsdp: int = 1
    context: int | None = None
    ring: int | None = None
    ulysses: int | None = None
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class MeshRequest:
    """What a config asks for: sizes within a slice (ici), across slices (dcn), and the split.

    `ulysses_shards` is the part of the whole context that is split by heads; -1 leaves it open.
    """

    ici: AxisSizes = AxisSizes()
    dcn: AxisSizes = AxisSizes()
    ulysses_shards: int = FILL_IN


@dataclass(frozen=True, kw_only=True)
class MeshSplit:
    """The shape within a slice and the shape across slices; axis by axis they multiply."""

    ici: MeshShape
    dcn: MeshShape

    @property
    def shape(self) -> MeshShape:
        """The shape of the whole mesh."""
        products = [a * b for a, b in zip(self.ici.sizes, self.dcn.sizes, strict=True)]
        data, fsdp, ring, ulysses, tensor = products
        return MeshShape(data=data, fsdp=fsdp, ring=ring, ulysses=ulysses, tensor=tensor)


def mesh_request(values: Mapping[str, int | None], ulysses_shards: int) -> MeshRequest:
    """The request of config keys such as `ici_context_parallelism`."""

    def sizes(place: str) -> AxisSizes:
        axes = ("data", "fsdp", "context", "ring", "ulysses", "tensor")
        return AxisSizes(**{axis: values[f"{place}_{axis}_parallelism"] for axis in axes})  # type: ignore[arg-type]

    return MeshRequest(ici=sizes("ici"), dcn=sizes("dcn"), ulysses_shards=ulysses_shards)


def resolve(
    request: MeshRequest, *, devices: int, slices: int = 1, heads: int | None = None
) -> MeshSplit:
    """The shapes for `devices` in `slices`; raises ProblemsFound with all that is wrong.

    Where nothing says how the context is split, as much of it as the heads allow goes to ulysses.
    """
    problems: list[Problem] = []
    if devices % slices:
        rule = f"{slices} slices must hold the same number of devices each"
        raise ProblemsFound(
            [Problem(name="devices", value=devices, rule=rule, remedy="Use whole slices")]
        )
    ici = Filling("ici", request.ici, devices // slices, "devices in a slice", problems).filled()
    dcn = Filling("dcn", request.dcn, slices, "slices", problems).filled()
    if ici is None or dcn is None:
        raise ProblemsFound(problems)
    outer = split_across(request.dcn, dcn.context, problems)
    wanted = wanted_ulysses(request, dcn.tensor * ici.tensor, outer[1], ici.context, heads)
    inner = split_within(request, ici.context, outer[1], wanted, problems)
    if problems:
        raise ProblemsFound(problems)
    return MeshSplit(ici=ici.shape(inner), dcn=dcn.shape(outer))


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Sizes over one kind of link with nothing left open but the split of the context."""

    data: int
    fsdp: int
    context: int
    tensor: int

    def shape(self, split: tuple[int, int]) -> MeshShape:
        """The shape with the context split into (ring, ulysses)."""
        ring, ulysses = split
        return MeshShape(
            data=self.data, fsdp=self.fsdp, ring=ring, ulysses=ulysses, tensor=self.tensor
        )


@dataclass(frozen=True)
class Filling:
    """Fills in the one open size of an AxisSizes for a number of devices or slices."""

    place: str
    sizes: AxisSizes
    total: int
    noun: str
    problems: list[Problem]

    def filled(self) -> Filled | None:
        """The sizes with the open one filled in; None, and a problem, if they do not fit."""
        sizes = self.stated()
        for axis, size in sizes.items():
            if size < 1 and size != FILL_IN:
                self.wrong(axis, size, "sizes are whole numbers from 1, or -1", "Use -1 or 1")
                return None
        open_axes = [axis for axis, size in sizes.items() if size == FILL_IN]
        if self.sizes.ring == self.sizes.ulysses == FILL_IN:
            open_axes = ["ring", "ulysses"]
        if len(open_axes) > 1:
            names = " and ".join(f"{self.place}_{axis}_parallelism" for axis in open_axes)
            rule = f"only one size can be filled in, but {names} are open"
            self.wrong(open_axes[0], FILL_IN, rule, "Give numbers to all but one of them")
            return None
        known = math.prod(size for size in sizes.values() if size != FILL_IN)
        if open_axes and self.total % known == 0:
            sizes[open_axes[0]] = self.total // known
        elif known != self.total:
            self.unfit(sizes, known)
            return None
        return Filled(**sizes)

    def stated(self) -> dict[str, int]:
        """The four sizes; a context that nobody stated is open unless another size already is."""
        sizes = self.sizes
        parts = [size for size in (sizes.ring, sizes.ulysses) if size is not None]
        whole = math.prod(parts) if len(parts) == 2 and FILL_IN not in parts else None
        context = sizes.context if sizes.context not in (None, FILL_IN) else whole
        if context is None:
            stated = sizes.context == FILL_IN or FILL_IN in parts
            context = FILL_IN
            if not stated and FILL_IN in (sizes.data, sizes.fsdp, sizes.tensor):
                context = math.prod(parts)
        return {"data": sizes.data, "fsdp": sizes.fsdp, "context": context, "tensor": sizes.tensor}

    def unfit(self, sizes: dict[str, int], known: int) -> None:
        """Adds the problem of a product that is not the number of devices."""
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        rule = f"their product is {known}, but the number of {self.noun} is {self.total}"
        others = known // sizes["context"] if sizes["context"] > 0 else known
        remedy = f"Choose sizes whose product is {self.total}"
        if self.total % others == 0:
            remedy += f", for example {self.place}_context_parallelism={self.total // others}"
        self.problems.append(
            Problem(name=f"{self.place}_*_parallelism", value=shown, rule=rule, remedy=remedy)
        )

    def wrong(self, axis: str, value: int, rule: str, remedy: str) -> None:
        """Adds a problem with one size."""
        name = f"{self.place}_{axis}_parallelism"
        self.problems.append(Problem(name=name, value=value, rule=rule, remedy=remedy))


def split_across(sizes: AxisSizes, context: int, problems: list[Problem]) -> tuple[int, int]:
    """(ring, ulysses) across slices: a ring, whose steps overlap with compute, unless stated."""
    return checked_split("dcn", sizes.ring, sizes.ulysses or 1, context, problems)


def wanted_ulysses(
    request: MeshRequest, tensor: int, outer: int, context: int, heads: int | None
) -> int | None:
    """The ulysses size within a slice that the request leads to; None if ring alone states it."""
    if request.ici.ulysses not in (None, FILL_IN):
        return request.ici.ulysses
    if request.ulysses_shards != FILL_IN:
        return max(1, request.ulysses_shards // outer)
    if request.ici.ring not in (None, FILL_IN) or request.ici.ulysses == FILL_IN:
        return None
    if heads is None or heads % (tensor * outer):
        return context
    return math.gcd(context, heads // (tensor * outer))


def split_within(
    request: MeshRequest,
    context: int,
    outer: int,
    wanted: int | None,
    problems: list[Problem],
) -> tuple[int, int]:
    """(ring, ulysses) within a slice, held against `ulysses_shards`."""
    shards = request.ulysses_shards
    stated = request.ici.ulysses not in (None, FILL_IN)
    if shards != FILL_IN and not stated and (shards % outer or context % (shards // outer or 1)):
        fitting = ", ".join(str(outer * n) for n in range(1, context + 1) if context % n == 0)
        rule = f"must divide the context of {context * outer} devices"
        problems.append(
            Problem(name="ulysses_shards", value=shards, rule=rule, remedy=f"Use one of {fitting}")
        )
        return (1, 1)
    split = checked_split("ici", request.ici.ring, wanted, context, problems)
    if shards not in (FILL_IN, split[1] * outer) and not problems:
        rule = f"contradicts the ulysses size {split[1] * outer} of the mesh"
        remedy = "Leave out ulysses_shards or the ring and ulysses sizes"
        problems.append(Problem(name="ulysses_shards", value=shards, rule=rule, remedy=remedy))
    return split


def checked_split(
    place: str, ring: int | None, ulysses: int | None, context: int, problems: list[Problem]
) -> tuple[int, int]:
    """(ring, ulysses) whose product is the context; what does not divide becomes a problem."""
    ring = None if ring == FILL_IN else ring
    ulysses = None if ulysses == FILL_IN else ulysses
    stated = {"ring": ring, "ulysses": ulysses}
    if ring is None:
        ring = max(1, context // (ulysses or 1))
    if ulysses is None:
        ulysses = max(1, context // ring)
    if ring * ulysses != context:
        shown = ", ".join(f"{axis}={size}" for axis, size in stated.items() if size is not None)
        rule = f"ring x ulysses must be the context of {context}"
        remedy = f"Leave {place}_context_parallelism out, or one of ring and ulysses"
        name = f"{place}_context_parallelism"
        problems.append(Problem(name=name, value=shown, rule=rule, remedy=remedy))
    return ring, ulysses

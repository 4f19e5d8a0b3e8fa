"""Stand-ins for the devices of TPU slices: what planning and the order of a mesh read of them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DescribedCore:
    """A TPU core of a topology without hardware: it has a place, but no slice."""

    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str = "TPU7x"
    id: int = 0
    platform: str = "tpu"
    process_index: int = 0


@dataclass(frozen=True, kw_only=True)
class Core(DescribedCore):
    """A TPU core of a real slice."""

    slice_index: int = 0

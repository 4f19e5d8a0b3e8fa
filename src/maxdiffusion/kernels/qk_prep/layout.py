"""Where heads go: the layout of arrays that an exchange trades."""

from dataclasses import dataclass

from jaxtyping import Array, Int

Place = tuple[int, int, int]
EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class Places:
    """A place for every head: `heads[b][n]` is (array, block, slot) of head n of batch row b.

    Array i is [blocks, S, slots * H] with (blocks, slots) = `arrays[i]`. A slot that no head goes
    to holds zeros.
    """

    arrays: tuple[tuple[int, int], ...]
    heads: tuple[tuple[Place, ...], ...]

    @classmethod
    def at_home(cls, batch: int, heads: int) -> "Places":
        """Every head where it is: one array [B, S, N * H]."""
        rows = tuple(tuple((0, row, head) for head in range(heads)) for row in range(batch))
        return cls(arrays=((batch, heads),), heads=rows)

    @property
    def batch(self) -> int:
        """Batch rows of the columns."""
        return len(self.heads)

    @property
    def head_count(self) -> int:
        """Heads of one batch row."""
        return len(self.heads[0])

    @property
    def moves(self) -> bool:
        """Whether any head goes elsewhere."""
        return self != Places.at_home(self.batch, self.head_count)

    def slots(self) -> list[Place]:
        """Every slot, in the order of the arrays."""
        return [
            (array, block, slot)
            for array, (blocks, slots) in enumerate(self.arrays)
            for block in range(blocks)
            for slot in range(slots)
        ]

    def order(self) -> list[int]:
        """The head in each of `slots`, those of the first batch row counted first, or EMPTY."""
        every = [place for row in self.heads for place in row]
        at = {place: head for head, place in enumerate(every)}
        return [at.get(place, EMPTY) for place in self.slots()]

    def empty_slots(self) -> list[Place]:
        """Slots that no head goes to."""
        pairs = zip(self.slots(), self.order(), strict=True)
        return [place for place, head in pairs if head == EMPTY]


@dataclass(frozen=True, kw_only=True)
class HeadPlaces:
    """Where the heads of q and of the output go, and those of k and v.

    `order` are the heads in `queries.slots()`, or EMPTY, where those depend on the device.
    """

    queries: Places
    keys: Places
    order: Int[Array, " K"] | None = None

    @classmethod
    def alike(cls, places: Places) -> "HeadPlaces":
        """The same places for all of them."""
        return cls(queries=places, keys=places)

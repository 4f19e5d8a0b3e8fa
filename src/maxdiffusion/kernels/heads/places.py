"""Where heads go: the layout of arrays that an exchange trades."""

from dataclasses import dataclass

Place = tuple[int, int, int]


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

    def empty_slots(self) -> list[Place]:
        """Slots that no head goes to."""
        taken = {place for row in self.heads for place in row}
        return [
            (array, block, slot)
            for array, (blocks, slots) in enumerate(self.arrays)
            for block in range(blocks)
            for slot in range(slots)
            if (array, block, slot) not in taken
        ]

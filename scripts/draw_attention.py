"""Draw what moves where in each exchange; run as a script it writes docs/attention.svg."""

from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).parent.parent / "docs" / "attention.svg"
TOKENS = HEADS = DEVICES = 4
CELL, GAP = 11, 24
GRID = TOKENS * CELL
STEP = 2 * GRID + 3 * GAP
PANEL_HEIGHT = 152
WIDTH = 40 + DEVICES * STEP
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
EMPTY, INK = "#eeeeee", "#333333"


@dataclass(frozen=True, kw_only=True)
class Link:
    """An arrow between two devices; a link above the row and one below it do not cross."""

    start: int
    stop: int
    below: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One exchange: the (token, head) parts of k and v on a device before and under its kernel."""

    title: str
    caption: str
    before: list[set[tuple[int, int]]]
    under: list[set[tuple[int, int]]]
    links: list[Link]


def rows(*tokens: int, heads: range = range(HEADS)) -> set[tuple[int, int]]:
    return {(token, head) for token in tokens for head in heads}


def panels() -> list[Panel]:
    """The five exchanges on four devices."""
    own = [rows(device) for device in range(DEVICES)]
    everything = [rows(*range(TOKENS)) for _ in range(DEVICES)]
    one_head = [rows(*range(TOKENS), heads=range(d, d + 1)) for d in range(DEVICES)]
    ring_pairs = [rows(0, 1), rows(0, 1), rows(2, 3), rows(2, 3)]
    halves = [
        {cell for cell in pair if cell[1] // 2 == device % 2}
        for device, pair in enumerate(ring_pairs)
    ]
    neighbours = [(device, device + 1) for device in range(DEVICES - 1)]
    up = [Link(start=a, stop=b) for a, b in neighbours]
    down = [Link(start=b, stop=a, below=True) for a, b in neighbours]
    trades = [Link(start=0, stop=1), Link(start=2, stop=3)]
    hops = [Link(start=0, stop=2, below=True), Link(start=3, stop=1, below=True)]
    return [
        Panel(
            title="gather (flash)",
            caption="every device collects all keys and values",
            before=own,
            under=everything,
            links=up + down,
        ),
        Panel(
            title="ulysses",
            caption="all-to-all: some tokens of all heads become all tokens of some heads",
            before=own,
            under=one_head,
            links=up + down,
        ),
        Panel(
            title="ring",
            caption="keys go round in R - 1 hops; partial results are merged",
            before=own,
            under=own,
            links=[*up, Link(start=DEVICES - 1, stop=0, below=True)],
        ),
        Panel(
            title="ulysses x ring",
            caption="all-to-all inside pairs (0,1) and (2,3), then hops between the pairs",
            before=own,
            under=halves,
            links=trades + hops,
        ),
        Panel(
            title="both ways (bidir)",
            caption="two opposite streams, and nothing crosses the ends",
            before=own,
            under=own,
            links=up + down,
        ),
    ]


def grid(x: float, y: float, cells: set[tuple[int, int]]) -> list[str]:
    """Tokens down, heads across; a filled cell is held, its colour says whose tokens they were."""
    return [
        f'<rect x="{x + head * CELL}" y="{y + token * CELL}" width="{CELL - 1}" '
        f'height="{CELL - 1}" fill="{COLOURS[token] if (token, head) in cells else EMPTY}"/>'
        for token in range(TOKENS)
        for head in range(HEADS)
    ]


def text(x: float, y: float, words: str, *, size: int = 12, weight: str = "normal") -> str:
    look = f'font-size="{size}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x}" y="{y}" {look}>{words}</text>'


def arrow(link: Link, y: float) -> str:
    """A curve from device to device, flatter between neighbours."""
    x1, x2 = (20 + device * STEP + GRID + GAP / 2 for device in (link.start, link.stop))
    edge = y + GRID + 4 if link.below else y - 4
    bend = 8 + 5 * abs(link.stop - link.start)
    peak = edge + bend if link.below else edge - bend
    curve = f"M {x1} {edge} C {x1} {peak}, {x2} {peak}, {x2} {edge}"
    return f'<path d="{curve}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>'


def panel(item: Panel, top: float) -> list[str]:
    parts = [
        text(20, top + 16, item.title, size=14, weight="bold"),
        text(20 + STEP, top + 16, item.caption),
    ]
    y = top + 52
    for device in range(DEVICES):
        x = 20 + device * STEP
        parts += grid(x, y, item.before[device])
        parts.append(text(x + GRID + GAP / 2 - 6, y + GRID / 2 + 4, "&#8594;"))
        parts += grid(x + GRID + GAP, y, item.under[device])
        parts.append(text(x, y + GRID + 34, f"device {device}", size=11))
    return parts + [arrow(link, y) for link in item.links]


def drawing() -> str:
    """The whole picture as SVG."""
    items = panels()
    height = 44 + PANEL_HEIGHT * len(items)
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto">'
        f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{INK}"/></marker></defs>'
    )
    note = "k, v on each device: before the exchange, and under its kernel (tokens x heads)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">',
        tip,
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(20, 24, note),
    ]
    for index, item in enumerate(items):
        lines += panel(item, 40 + index * PANEL_HEIGHT)
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(drawing())

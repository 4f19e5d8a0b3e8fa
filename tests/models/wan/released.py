"""Names and shapes of the transformers of every released WAN model, from tests/goldens."""

import json
from pathlib import Path

_FILE = Path(__file__).parents[2] / "goldens" / "wan_tensors.json"
_MODELS = json.loads(_FILE.read_text())
RELEASED = sorted(_MODELS)


def released_tensors(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor; the file has `*` for the number of a block."""
    stored = _MODELS[model]
    tensors = {}
    for name, shape in stored["tensors"].items():
        count = stored[name.split(".")[0]] if "*" in name else 1
        for number in range(count):
            tensors[name.replace("*", str(number))] = tuple(shape)
    return tensors

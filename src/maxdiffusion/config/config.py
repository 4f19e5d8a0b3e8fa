"""A loaded config: its values, where each came from, and how it is printed and compared."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.config.keys import GROUPS, KEYS
from maxdiffusion.config.kinds import nearest_word
from maxdiffusion.config.schema import Frozen, Use

DEFAULT_SOURCE = "default"
OVERRIDE_SOURCE = "command line"
# These say which process of a job this is and where it finds the others.
OF_THE_PROCESS = ("jax_process_id", "jax_coordinator_address")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Resolved values as attributes (`config.height`); lists are tuples, nothing changes."""

    values: Frozen
    sources: Frozen
    files: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for names before there are values.
        if not name.startswith("_") and name != "values" and name in self.values:
            return self.values[name]
        raise AttributeError(f"no key {name!r}. {nearest_word(name, tuple(KEYS)) or ''}".strip())

    def source(self, name: str) -> str:
        """Where a value comes from: default, file and line, or command line; `a.b` for entries."""
        table = name.split(".")[0]
        if table not in self.values:
            raise KeyError(f"no key {name!r}. {nearest_word(name, tuple(KEYS)) or ''}".strip())
        return self.sources.get(name, self.sources.get(table, DEFAULT_SOURCE))

    def given(self, name: str) -> bool:
        """Whether a file or the command line states the key."""
        return self.source(name) != DEFAULT_SOURCE

    def overridden(self, name: str) -> bool:
        """Whether the command line states the key."""
        return self.source(name) == OVERRIDE_SOURCE

    def to_json(self) -> str:
        """The values as JSON, the same text for the same values."""
        return json.dumps(self.values, sort_keys=True, ensure_ascii=False)

    def shared_values(self) -> dict[str, Any]:
        """What is to be the same on all processes of a job, as JSON has it."""
        values = json.loads(self.to_json())
        return {name: value for name, value in values.items() if name not in OF_THE_PROCESS}

    def digest(self) -> str:
        """A hash of the shared values, wherever they came from and the processes meet."""
        text = json.dumps(self.shared_values(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """The values as YAML that loads to the same config, each with its source beside it."""
        lines = [f"# read from {' <- '.join(self.files)}"]
        for group, keys in GROUPS.items():
            # What says how to read and print is not part of what is printed.
            if group != "Config files":
                lines += [f"\n# {group}", *(self._line(key.name) for key in keys)]
        return "\n".join(lines)

    def _line(self, name: str) -> str:
        value = self.values[name]
        entries = value if isinstance(value, Mapping) else {}
        nested = {f"{name}.{entry}" for entry in entries}
        inner = [f"{part.split('.')[1]}: {self.source(part)}" for part in sorted(nested)]
        source = ", ".join(inner) or self.source(name)
        return f"{name}: {json.dumps(value, ensure_ascii=False)}  # {source}"


def without_meaning(config: Config) -> str | None:
    """One line that names the given keys that have no meaning here; None if there are none."""
    names = [name for name, key in KEYS.items() if key.use is Use.NO_MEANING and config.given(name)]
    if not names:
        return None
    return f"Keys without meaning here, not used ({len(names)}): {', '.join(names)}"

"""A loaded config: typed values, the source of each, and the config as text.

`Config` has one typed attribute per field of `schema.py`; values of public keys that this program
does not act on are in `config.compat`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from maxdiffusion.config.compat import COMPAT_FIELDS
from maxdiffusion.config.fields import Effect, Field, FrozenDict, declared_fields, nearest_word
from maxdiffusion.config.job_fields import (
    InputFields,
    QualityFields,
    QuantizationFields,
    ServingFields,
    StepFields,
    TrainingImageFields,
    TrainingLoraFields,
    TrainingMemoryFields,
    TrainingWatchFields,
)
from maxdiffusion.config.schema import (
    GENERATION_GROUPS,
    TRAINING_GROUPS,
    AttentionFields,
    ConfigFileFields,
    DeviceFields,
    ModelFields,
    NumberFields,
    OutputFields,
    PreflightFields,
    SamplingFields,
    StartUpFields,
    TrainingDataFields,
    TrainingFields,
    VaeFields,
)

GROUPS: Mapping[str, tuple[Field, ...]] = MappingProxyType(
    {
        **{t: declared_fields(g, Effect.USED) for t, g in GENERATION_GROUPS.items()},
        **{t: declared_fields(g, Effect.TRAINING) for t, g in TRAINING_GROUPS.items()},
    }
)
FIELDS: Mapping[str, Field] = MappingProxyType(
    {field.name: field for group in GROUPS.values() for field in group}
)
ALL_FIELDS: Mapping[str, Field] = MappingProxyType({**FIELDS, **COMPAT_FIELDS})

DEFAULT_SOURCE = "default"
OVERRIDE_SOURCE = "command line"
COMPAT_TITLE = "Public keys without effect"
# Differ between the processes of a job: which process this is, and where it finds the others.
PER_PROCESS = ("jax_process_id", "jax_coordinator_address")


@dataclass(frozen=True, kw_only=True, repr=False)  # `describe` shows the values
class Config(
    ConfigFileFields,
    ModelFields,
    SamplingFields,
    StepFields,
    InputFields,
    OutputFields,
    NumberFields,
    QuantizationFields,
    AttentionFields,
    DeviceFields,
    StartUpFields,
    PreflightFields,
    QualityFields,
    VaeFields,
    ServingFields,
    TrainingFields,
    TrainingDataFields,
    TrainingImageFields,
    TrainingLoraFields,
    TrainingWatchFields,
    TrainingMemoryFields,
):
    """A resolved config. Lists are tuples and tables are frozen, so nothing changes."""

    compat: FrozenDict[object]
    sources: FrozenDict[str]
    files: tuple[str, ...]

    @property
    def values(self) -> Mapping[str, object]:
        """Returns all values by name, those of `compat` included."""
        return {name: vars(self)[name] for name in FIELDS} | self.compat

    def source(self, name: str) -> str:
        """Returns where a value comes from; `table.entry` names an entry of a table.

        A source is `default`, `FILE:LINE`, the path of a Python file or `command line`.
        """
        table = name.split(".")[0]
        if table not in ALL_FIELDS:
            raise KeyError(f"no field {name!r}. {nearest_word(name, tuple(ALL_FIELDS))}".strip())
        return self.sources.get(name, self.sources.get(table, DEFAULT_SOURCE))

    def given(self, name: str) -> bool:
        """Returns whether a file or the command line states the field."""
        return self.source(name) != DEFAULT_SOURCE

    def overridden(self, name: str) -> bool:
        """Returns whether the command line states the field."""
        return self.source(name) == OVERRIDE_SOURCE

    def to_json(self) -> str:
        """Returns the values as JSON: the same text for the same values."""
        return json.dumps(self.values, sort_keys=True, ensure_ascii=False)

    def shared_values(self) -> dict[str, object]:
        """Returns the values that all processes of a job must agree on, as JSON types."""
        values: dict[str, object] = json.loads(self.to_json())
        return {name: value for name, value in values.items() if name not in PER_PROCESS}

    def digest(self) -> str:
        """Returns a hash of the shared values; sources do not count."""
        # Loads OpenSSL, which a refused config does not need.
        import hashlib

        text = json.dumps(self.shared_values(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """Returns the values as YAML that loads to the same config, with sources as comments."""
        lines = [f"# read from {' <- '.join(self.files)}"] if self.files else []
        # The fields about files and printing are no part of the result.
        groups = {title: fields for title, fields in GROUPS.items() if title != "Config files"}
        values = self.values
        for title, fields in {**groups, COMPAT_TITLE: (*COMPAT_FIELDS.values(),)}.items():
            lines += [f"\n# {title}", *(self._line(field.name, values) for field in fields)]
        return "\n".join(lines)

    def _line(self, name: str, values: Mapping[str, object]) -> str:
        value = values[name]
        entries = sorted(value) if isinstance(value, Mapping) else ()
        inner = [f"{entry}: {self.source(f'{name}.{entry}')}" for entry in entries]
        source = ", ".join(inner) or self.source(name)
        return f"{name}: {json.dumps(value, ensure_ascii=False)}  # {source}"


def ignored_fields(config: Config) -> str | None:
    """Returns one line that names the stated keys without meaning here; None if there are none."""
    names = [
        name
        for name, field in COMPAT_FIELDS.items()
        if field.effect is Effect.NO_MEANING and config.given(name)
    ]
    if not names:
        return None
    return f"Keys without meaning here, not used ({len(names)}): {', '.join(names)}"

"""Every key that a config may hold, in groups; `docs/configuration.md` is written from here."""

from collections.abc import Mapping
from types import MappingProxyType

from maxdiffusion.config.keys import (
    adapters,
    attention,
    data,
    devices,
    leftovers,
    model,
    output,
    precision,
    preflight,
    sampling,
    startup,
    step_caches,
    training,
    vae,
    video_conditioning,
)
from maxdiffusion.config.schema import Key

GROUPS: Mapping[str, tuple[Key, ...]] = MappingProxyType(
    {
        "Config files": startup.FILES,
        "Model": model.KEYS,
        "Prompts and sampling": sampling.KEYS,
        "Output": output.KEYS,
        "Numbers": precision.KEYS,
        "Attention": attention.KEYS,
        "Devices": devices.KEYS,
        "Start-up and compilation": startup.KEYS,
        "Preflight": preflight.KEYS,
        "VAE": vae.KEYS,
        "Step caches": step_caches.KEYS,
        "Adapters and quantization": adapters.KEYS,
        "Images and driving videos": video_conditioning.KEYS,
        "Training": training.KEYS,
        "Training data": data.KEYS,
        "Left over from image models": leftovers.KEYS,
    }
)


def by_name() -> dict[str, Key]:
    """All keys by name; a name that stands in two places is refused."""
    table: dict[str, Key] = {}
    for key in (key for keys in GROUPS.values() for key in keys):
        if key.name in table:
            raise ValueError(f"key {key.name} stands twice in the table of keys")
        table[key.name] = key
    return table


KEYS: Mapping[str, Key] = MappingProxyType(by_name())

"""From a checkpoint folder to parameters on the mesh, all components at once."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from maxdiffusion.pipelines.programs import Workshop
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.loading import ComponentSource, Progress, load_components
from maxdiffusion.weights.orbax_cache import load_through_cache
from maxdiffusion.weights.transformer_map import transformer_map
from maxdiffusion.weights.umt5_map import umt5_map
from maxdiffusion.weights.vae_map import vae_map


@dataclass(frozen=True, kw_only=True)
class WanParameters:
    """The weights of a model on its mesh; `transformers` by the name of their folder.

    A run that finds every prompt encoded has no text encoder.
    """

    transformers: dict[str, nnx.State]
    vae: nnx.State
    text_encoder: nnx.State | None


@dataclass(frozen=True, kw_only=True)
class LoadedParameters:
    """The weights, and what the cache has to say about them."""

    parameters: WanParameters
    messages: tuple[str, ...]


def component_sources(folder: ModelFolder, workshop: Workshop) -> dict[str, ComponentSource]:
    """Where the weights of every component come from, and what they become."""
    spec, models = workshop.spec, workshop.models
    table = transformer_map(spec.transformer)
    sources = {
        name: ComponentSource(
            stored=folder.weights[name], table=table, abstract=models.transformer.parameters
        )
        for name in spec.experts
    }
    sources["vae"] = ComponentSource(
        stored=folder.weights["vae"], table=vae_map(spec.vae), abstract=models.vae.parameters
    )
    sources["text_encoder"] = ComponentSource(
        stored=folder.weights["text_encoder"],
        table=umt5_map(spec.text_encoder),
        abstract=models.text_encoder.parameters,
    )
    return sources


def load_wan_parameters(
    folder: ModelFolder,
    workshop: Workshop,
    *,
    without: Collection[str] = (),
    cache: Path | None = None,
    progress: Progress | None = None,
) -> LoadedParameters:
    """The parameters of a model, read side by side, through `cache` if there is one.

    `without` may hold "text_encoder": it is then left out.
    """
    sources = {
        name: source
        for name, source in component_sources(folder, workshop).items()
        if name not in without
    }
    if cache is None:
        states, _ = load_components(sources, mesh=workshop.mesh, progress=progress)
        messages: tuple[str, ...] = ()
    else:
        cached = load_through_cache(sources, cache, mesh=workshop.mesh, progress=progress)
        states, messages = dict(cached.states), cached.messages
    parameters = WanParameters(
        transformers={name: states[name] for name in workshop.spec.experts},
        vae=states["vae"],
        text_encoder=states.get("text_encoder"),
    )
    return LoadedParameters(parameters=parameters, messages=messages)

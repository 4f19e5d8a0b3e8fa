"""From a checkpoint folder to parameters on the mesh, all components at once."""

from dataclasses import dataclass

from flax import nnx

from maxdiffusion.pipelines.programs import Workshop
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.loading import ComponentSource, LoadReport, Progress, load_components
from maxdiffusion.weights.transformer_map import transformer_map
from maxdiffusion.weights.umt5_map import umt5_map
from maxdiffusion.weights.vae_map import vae_map


@dataclass(frozen=True, kw_only=True)
class WanParameters:
    """The weights of a model on its mesh; `transformers` by the name of their folder."""

    transformers: dict[str, nnx.State]
    vae: nnx.State
    text_encoder: nnx.State


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
    folder: ModelFolder, workshop: Workshop, *, progress: Progress | None = None
) -> tuple[WanParameters, LoadReport]:
    """The parameters of a whole model, read side by side, and what the load cost."""
    sources = component_sources(folder, workshop)
    states, report = load_components(sources, mesh=workshop.mesh, progress=progress)
    parameters = WanParameters(
        transformers={name: states[name] for name in workshop.spec.experts},
        vae=states["vae"],
        text_encoder=states["text_encoder"],
    )
    return parameters, report

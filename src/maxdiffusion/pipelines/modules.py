"""The models of a checkpoint as structure and abstract parameters: shapes, dtypes, places."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.models.umt5 import Umt5Encoder
from maxdiffusion.models.vae import WanVae
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import WanSpec

Model = TypeVar("Model", bound=nnx.Module)


@dataclass(frozen=True, kw_only=True)
class AbstractModel(Generic[Model]):
    """A model without its weights: the structure, and what every parameter will be."""

    graph: nnx.GraphDef[Model]
    parameters: nnx.State

    def on(self, mesh: Mesh) -> nnx.State:
        """The parameters as shapes with the places that the mesh gives them."""

        def placed(variable: nnx.Variable) -> nnx.Variable:
            sharding = parameter_sharding(mesh, variable.dims, variable.shape)
            return variable.replace(
                jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)
            )

        flat = nnx.to_flat_state(self.parameters)
        return nnx.from_flat_state([(path, placed(variable)) for path, variable in flat])


@dataclass(frozen=True, kw_only=True)
class WanModels:
    """The three kinds of model; both experts share one structure."""

    transformer: AbstractModel[WanTransformer]
    vae: AbstractModel[WanVae]
    text_encoder: AbstractModel[Umt5Encoder]


def abstract_model(build: Callable[[nnx.Rngs], Model]) -> AbstractModel[Model]:
    """The model that `build` makes, without computing any of its weights."""
    graph, parameters = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    return AbstractModel(graph=graph, parameters=parameters)


def wan_models(spec: WanSpec, precision: Precision) -> WanModels:
    """The models that a spec describes, in the given precision."""
    return WanModels(
        transformer=abstract_model(
            lambda rngs: WanTransformer(
                spec.transformer,
                dtype=precision.activations,
                param_dtype=precision.weights,
                rngs=rngs,
            )
        ),
        vae=abstract_model(
            lambda rngs: WanVae(
                spec.vae, dtype=precision.vae, param_dtype=precision.vae_weights, rngs=rngs
            )
        ),
        text_encoder=abstract_model(
            lambda rngs: Umt5Encoder(
                spec.text_encoder,
                dtype=precision.text_encoder,
                param_dtype=precision.text_encoder,
                rngs=rngs,
            )
        ),
    )

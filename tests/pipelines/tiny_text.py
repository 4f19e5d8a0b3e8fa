"""The tokenizer and text encoder of the tiny checkpoint, with programs that record their calls."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxdiffusion.checkpoints.load import ComponentSource, load_parameters
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.pipelines.text import PromptEncoder, PromptTokenizer, TextPrograms

GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINT = GOLDENS / "wan22_t2v"
GOLDEN = np.load(GOLDENS / "text.npz")
PROMPTS = json.loads(str(GOLDEN["prompts_json"]))


@dataclass(frozen=True, kw_only=True)
class TinyText:
    """What an encoder is made of, and what was compiled and encoded with it."""

    tokenizer: PromptTokenizer
    programs: TextPrograms
    weights: nnx.State
    compiled: list[str]
    encoded: list[tuple[int, ...]]

    def encoder(self, **changes: Any) -> PromptEncoder:
        """Returns an encoder that remembers nothing yet."""
        parts = {"tokenizer": self.tokenizer, "programs": self.programs, "weights": self.weights}
        return PromptEncoder(**(parts | changes))


@dataclass(frozen=True)
class Recorder:
    """Compiles programs; records their names and the ids of every text that they encode."""

    compiled: list[str] = field(default_factory=list)
    encoded: list[tuple[int, ...]] = field(default_factory=list)

    def compile(self, name: str, lowered: jax.stages.Lowered) -> Callable[..., jax.Array]:
        self.compiled.append(name)
        program = lowered.compile()

        def run(weights: nnx.State, ids: np.ndarray, mask: np.ndarray) -> jax.Array:
            self.encoded.append(tuple(ids[mask.astype(bool)].tolist()))
            return program(weights, ids, mask)

        return run


def load_tokenizer() -> PromptTokenizer:
    return PromptTokenizer.load(CHECKPOINT / "tokenizer")


def load_text(tokenizer: PromptTokenizer, mesh: jax.sharding.Mesh | None = None) -> TinyText:
    """Reads the tiny text encoder."""
    folder = CHECKPOINT / "text_encoder"
    config = Umt5Config.from_transformers(json.loads((folder / "config.json").read_text()))
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Umt5Encoder(config, rngs=nnx.Rngs(0))))
    source = ComponentSource(stored=open_weights(folder), table=umt5_map(config), abstract=abstract)
    weights, _ = load_parameters(source, mesh=mesh)
    recorder = Recorder()
    return TinyText(
        tokenizer=tokenizer,
        programs=TextPrograms(graph, mesh, recorder.compile),
        weights=weights,
        compiled=recorder.compiled,
        encoded=recorder.encoded,
    )

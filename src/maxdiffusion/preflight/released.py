"""The sizes of released models by hub id, so that nothing is downloaded to know them."""

from collections.abc import Callable, Mapping

from maxdiffusion.models.umt5 import Umt5Config
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.models.wan.config import wan_2_1_t2v_1_3b, wan_2_1_t2v_14b, wan_2_2_t2v_a14b
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.weights.folder import is_remote

# Hub id -> sizes of a transformer, and where experts change (None: there is one).
RELEASED: Mapping[str, tuple[Callable[[], WanTransformerConfig], float | None]] = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (wan_2_2_t2v_a14b, 0.875),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (wan_2_1_t2v_14b, None),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (wan_2_1_t2v_1_3b, None),
}
# The sampler that every release names; its other settings do not change a program.
_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}


def find_spec(location: str) -> WanSpec:
    """The spec of a folder, or of a released model by its hub id."""
    if not is_remote(location):
        return open_wan_folder(location)[1]
    if location not in RELEASED:
        raise ProblemsFound(
            [
                Problem(
                    name="pretrained_model_name_or_path",
                    value=location,
                    rule="its sizes are not known here, and nothing is downloaded for them",
                    remedy=f"Name a folder, or one of {', '.join(RELEASED)}",
                )
            ]
        )
    sizes, boundary = RELEASED[location]
    return WanSpec(
        transformer=sizes(),
        vae=WanVaeConfig(),
        text_encoder=Umt5Config(),
        scheduler=_SCHEDULER,
        boundary_ratio=boundary,
    )

"""WAN text-to-video pipeline, with the names and arguments of diffusers."""

from collections.abc import Sequence
from typing import Any, final

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.pipelines.base import OutputType, VideoPipeline, WanOutput
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.spec import WanSpec


@final
class WanPipeline(VideoPipeline):
    """A loaded WAN text-to-video model on a mesh."""

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        output_type: OutputType = "np",
        max_sequence_length: int | None = None,
        **arguments: Any,
    ) -> WanOutput:
        """Generates one video for each prompt (times `num_videos_per_prompt`).

        The other arguments are those of `request_from_arguments`: height, width, num_frames,
        num_inference_steps, guidance_scale, guidance_scale_2, num_videos_per_prompt, seed, latents,
        flow_shift, boundary_ratio, sigmas.
        """
        self.check_output(output_type, max_sequence_length)
        check_text_only(self.builder.spec)
        request = request_from_arguments(
            self.builder.spec, prompt=prompt, negative_prompt=negative_prompt, **arguments
        )
        return self.generate(request, output_type)


def check_text_only(spec: WanSpec) -> None:
    """Raises for a model that cannot run from a text alone."""
    kinds = {
        "an image: use WanImageToVideoPipeline": spec.image_channels,
        "a control video: use WanVACEPipeline": bool(spec.transformer.control_layers),
    }
    needed = [need for need, is_needed in kinds.items() if is_needed]
    if needed:
        problem = Problem(
            name="WanPipeline",
            value=f"{spec.transformer.in_channels} input channels",
            rule=f"this checkpoint needs {needed[0]}",
        )
        raise ProblemsFound([problem])

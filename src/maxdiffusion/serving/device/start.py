"""Resolves the model of a server: sizes, the inputs that requests may bring, samples of them."""

import io
import logging
from collections.abc import Mapping
from dataclasses import replace

from PIL import Image

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.config.job_fields import stated_inputs
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.distributed.coordination import (
    all_gather_str,
    broadcast_from_first,
    is_multiprocess,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.job import ResolvedJob, resolve_job
from maxdiffusion.generation.settings import transformer_files
from maxdiffusion.pipelines.request import VideoShape
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.serving.device.work import has_adapters
from maxdiffusion.serving.offer import Size
from maxdiffusion.serving.uploads import InputFiles

logger = logging.getLogger(__name__)
SAMPLE_SIDE = 64


def parse_sizes(config: Config) -> tuple[Size, ...]:
    """Returns `serve_sizes`, or the one size of the config; raises all that cannot be read."""
    usual = Size(width=config.width, height=config.height, frames=config.num_frames)
    found = {text: Size.parse(text, config.num_frames) for text in config.serve_sizes}
    rule = "must be WIDTHxHEIGHTxFRAMES, such as 1280x720x81"
    Collector(
        [
            Problem(name="serve_sizes", value=text, rule=rule)
            for text, size in found.items()
            if size is None
        ]
    ).raise_if_any()
    return tuple(size for size in found.values() if size is not None) or (usual,)


def offered_inputs(spec: WanSpec) -> dict[str, bool]:
    """Returns the images and videos that requests may bring, and whether they must."""
    if spec.transformer.control_layers:
        return {"input_video": False, "input_mask": False, "reference_images": False}
    if spec.image_channels:
        last = {"input_last_image": spec.image_encoder is not None}
        takes_last = spec.image_encoder is None or spec.transformer.image_positions is not None
        return {"input_reference": True, **(last if takes_last else {})}
    first = {"input_reference": False} if spec.time_per_token else {}
    return {**first, "input_video": False}


def check_servable(spec: WanSpec) -> None:
    """Raises for a model whose videos are made in segments."""
    if spec.animates:
        rule = (
            "Animate makes a video in segments, and the server resumes, cancels and estimates "
            "videos of one segment"
        )
        remedy = "Use generate_wan_animate for this model"
        problem = Problem(
            name="pretrained_model_name_or_path", value="Animate", rule=rule, remedy=remedy
        )
        raise ProblemsFound([problem])


def sample_image(files: InputFiles) -> str:
    """Keeps a gray image and returns its name."""
    buffer = io.BytesIO()
    Image.new("RGB", (SAMPLE_SIDE, SAMPLE_SIDE), "gray").save(buffer, format="PNG")
    return files.keep("input_reference", buffer.getvalue())


def resolve_model(parsed: ParsedConfig, files: InputFiles) -> tuple[ResolvedJob, ModelFolder]:
    """Returns the job of a server's config; images that its model needs are gray ones."""
    config = parsed.config
    if has_adapters(config):  # loaded by their names, not fused
        config = replace(config, enable_lora=False)
    if config.model_type == "I2V":
        config = replace(config, image_url=str(files.path(sample_image(files))))
    try:
        return resolve_job(replace(parsed, config=config))
    except ProblemsFound as found:
        if not {problem.name for problem in found.problems} <= {*stated_inputs(config)}:
            raise
        # Only inputs are wrong, so the model can be opened: it alone knows what it needs.
        _, spec = open_wan_folder(config.pretrained_model_name_or_path, transformer_files(config))
        check_servable(spec)
        if not offered_inputs(spec).get("input_last_image"):
            raise
    last = replace(config, last_image_path=config.image_url)
    return resolve_job(replace(parsed, config=last))


def shared_inputs(
    inputs: Mapping[str, bool], files: InputFiles, output_dir: str
) -> Mapping[str, bool]:
    """Returns the inputs that all processes can read; raises if the model needs one of them.

    Process 0 stores what requests bring; the others read it from the same folder.
    """
    if not inputs or not is_multiprocess():
        return inputs
    name = broadcast_from_first("a sample of inputs", lambda: sample_image(files))
    if "" not in all_gather_str("inputs", "seen" if files.path(name).exists() else ""):
        return inputs
    rule = "files of requests are kept in its folder inputs, and not all processes see it"
    remedy = "Use a folder or bucket that all of them share"
    if any(inputs.values()):
        problem = Problem(name="output_dir", value=output_dir, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])
    logger.warning("requests may not bring %s: output_dir: %s", ", ".join(inputs), rule)
    return {}


def shape_of(size: Size) -> VideoShape:
    """Returns the shape of a size."""
    return VideoShape(height=size.height, width=size.width, num_frames=size.frames)

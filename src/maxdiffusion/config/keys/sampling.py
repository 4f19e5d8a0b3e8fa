"""Keys about prompts, the size of the video, and how it is sampled."""

from maxdiffusion.config.kinds import Boolean, Choice, Integer, Nullable, Number, Text, TextOrTexts
from maxdiffusion.config.schema import refused, unused, used

PROMPT = (
    "A red fox trots along a snowy forest path at dawn, its breath visible in the cold air, while "
    "low sunlight falls between the trees."
)
NEGATIVE_PROMPT = (
    "overexposed, washed-out colours, frozen motion, out of focus, captions, watermark, "
    "compression artefacts, low resolution, malformed hands, extra fingers, distorted faces, "
    "cluttered background, people walking backwards"
)

KEYS = (
    used("prompt", TextOrTexts(), PROMPT, "What the video shows; a list makes one job of many."),
    used(
        "prompts_file",
        Text(),
        "",
        "Text file with one prompt per line, instead of `prompt`; empty = none.",
    ),
    used("negative_prompt", Text(), NEGATIVE_PROMPT, "What guidance steers away from."),
    used("seed", Integer(minimum=0, maximum=2**32 - 1), 0, "Seed of a prompt's first video."),
    used(
        "num_videos",
        Nullable(Integer(minimum=1)),
        None,
        "Videos per prompt, with seeds seed, seed+1, ...; null = one batch of them.",
    ),
    used(
        "per_device_batch_size",
        Nullable(Number(above=0)),
        None,
        "Videos made at once = whole part of devices x this; null = one at a time.",
    ),
    used("height", Integer(minimum=16, step=16), 720, "Rows of the video, in pixels."),
    used("width", Integer(minimum=16, step=16), 1280, "Columns of the video, in pixels."),
    used("num_frames", Integer(minimum=1, step=4, offset=1), 81, "Frames of the video."),
    used("fps", Integer(minimum=1), 16, "Frames per second of the file."),
    used("num_inference_steps", Integer(minimum=1), 40, "Denoise steps."),
    used(
        "scheduler",
        Choice(("unipc", "euler")),
        "unipc",
        "Sampler: UniPC (order 2, bh2) or Euler, both for flow matching.",
    ),
    used("flow_shift", Number(above=0), 12.0, "Shift of the noise schedule towards high noise."),
    used(
        "guidance_scale",
        Nullable(Number()),
        None,
        "wan2.1: strength of guidance, null = 5; up to 1 turns it off. wan2.2 has two scales.",
    ),
    used(
        "guidance_scale_high",
        Number(),
        4.0,
        "wan2.2: strength of guidance with the high-noise expert; up to 1 turns it off.",
    ),
    used(
        "guidance_scale_low",
        Number(),
        3.0,
        "wan2.2: strength of guidance with the low-noise expert; up to 1 turns it off.",
    ),
    used(
        "boundary_ratio",
        Number(minimum=0, maximum=1),
        0.875,
        "wan2.2: the high-noise expert works while timestep >= this x 1000.",
    ),
    refused(
        "do_classifier_free_guidance",
        Boolean(),
        True,
        "Whether prompts are guided at all.",
        way_out="Set guidance_scale (wan2.1) or guidance_scale_high and _low (wan2.2) to 1",
    ),
    refused(
        "guidance_rescale",
        Number(),
        0.0,
        "Rescaling of guided predictions; 0 = none.",
        way_out="Leave it at 0",
    ),
    unused("prompt_2", Text(), "", "Second prompt of image models with two text encoders."),
    unused(
        "scan_diffusion_loop",
        Boolean(),
        False,
        "Compile the loop over steps as one program; here each step is one.",
    ),
)

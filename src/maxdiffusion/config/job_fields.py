"""Config fields of inputs, of some trainings and of the server, declared as in `schema.py`.

Paths are relative to the current folder; each of them may be an http(s) address. Public names are
kept: `image_url` is the first frame, the `_path` fields of Animate are those of its public file.
"""

from typing import TYPE_CHECKING

from maxdiffusion.config.fields import (
    Choice,
    FrozenDict,
    Integer,
    ListOf,
    Nullable,
    Number,
    NumberOrNumbers,
    Table,
    Text,
    field_group,
    setting,
)

if TYPE_CHECKING:
    from maxdiffusion.config.config import Config

POSITIVE = Integer(minimum=1)

NON_NEGATIVE = Integer(minimum=0)
RATIOS = ListOf(Number(above=0))
NO_PRESETS: FrozenDict[object] = FrozenDict()

STEP_CACHES = ("use_magcache", "use_cfg_cache", "use_sen_cache", "use_taylor_cache")
"""Fields that turn on a step cache."""


@field_group
class StepFields:
    """Steps that differ from the sampler's own, and what a step may leave out."""

    denoising_step_list: tuple[float, ...] = setting(
        (),
        "Timesteps of few-step models before the shift, such as [1000, 750, 500, 250]; empty = "
        "those of the sampler.",
        ListOf(Number(above=0, maximum=1000)),
    )
    sigmas: tuple[float, ...] = setting(
        (),
        "Noise levels before the shift, the same as `denoising_step_list` / 1000; empty = those of "
        "the sampler.",
        ListOf(Number(above=0, maximum=1)),
    )
    boundary_step_index: int | None = setting(
        None,
        "wan2.2: steps of the high-noise expert, in place of `boundary_ratio`; null = by timestep.",
        Nullable(Integer(minimum=0)),
    )
    guidance_end_step: int | None = setting(
        None,
        "Steps with guidance; later ones compute the prompt only, and a data axis of 2 joins the "
        "ring for them; null = all steps.",
        Nullable(Integer(minimum=1)),
    )
    use_magcache: bool = setting(
        False, "Lossy: skip the blocks of steps by measured ratios of magnitudes (MagCache)."
    )
    magcache_thresh: float = setting(
        0.04, "MagCache: limit of the summed error.", Number(minimum=0)
    )
    magcache_K: int = setting(  # noqa: N815
        2, "MagCache: longest run of skipped steps.", Integer(minimum=0)
    )
    retention_ratio: float = setting(
        0.2,
        "MagCache: share of an expert's steps, from its first, that are never skipped.",
        Number(minimum=0, maximum=1),
    )
    mag_ratios_base: tuple[float, ...] = setting(
        (),
        "MagCache: ratios of prompt and negative prompt in turn, as calibrate_cache measures them; "
        "empty = the published ones of the model.",
        RATIOS,
    )
    mag_ratios_base_720p: tuple[float, ...] = setting(
        (),
        "MagCache: the same for videos of at least 720 rows, where the key above is empty.",
        RATIOS,
    )
    mag_ratios_base_480p: tuple[float, ...] = setting(
        (), "MagCache: the same for smaller videos.", RATIOS
    )
    use_cfg_cache: bool = setting(
        False, "Lossy: estimate the prediction of the negative prompt in four of five steps."
    )
    use_sen_cache: bool = setting(
        False, "Lossy: repeat the last prediction while the latents move little (SenCache)."
    )
    use_taylor_cache: bool = setting(
        False, "Lossy: continue the last two predictions in a straight line (TaylorSeer)."
    )
    taylor_cache_interval: int = setting(
        2,
        "Taylor cache: steps from one computed step to the next, in the middle of a run.",
        Integer(minimum=2, maximum=3),
    )


@field_group
class QuantizationFields:
    """Weights of the transformer's blocks in 8 bits: lossy, half the memory of bfloat16."""

    use_qwix_quantization: bool = setting(
        False, "Lossy: keep the weights of blocks in the format `quantization`; qwix is not needed."
    )
    quantization: str = setting(
        "",
        "8-bit format, with a scale for each output feature: int8, or fp8 (float8_e4m3fn); "
        "fp8_full = fp8 with `quantize_activations: always`; empty = none.",
        Choice(("", "int8", "fp8", "fp8_full")),
    )
    quantize_activations: str = setting(
        "auto",
        "With 8-bit weights: round activations to the same format, token by token, before they "
        "are multiplied; auto = where the chip multiplies it faster than bfloat16.",
        Choice(("auto", "always", "never")),
    )


@field_group
class InputFields:
    """Images and videos that a job is given, and how they are used."""

    image_url: str = setting(
        "", "Image to video: path or http(s) address of the first frame; empty = none."
    )
    last_image_path: str = setting("", "Image to video: the last frame; empty = none.")
    image_fit: str = setting(
        "stretch",
        "Inputs of another aspect ratio: stretch them (as diffusers), crop their centre, or pad "
        "them with black bars.",
        Choice(("stretch", "crop", "pad")),
    )
    latents_path: str = setting(
        "",
        "Initial latents in place of the seed's noise: .safetensors with one tensor or .npy, "
        "[C, F, H, W] for all videos or [B, C, F, H, W] with one row per video; empty = none.",
    )
    video_path: str = setting(
        "",
        "Video to video and VACE: video file, address or folder of frames. A file is resampled to "
        "`fps` (frame i is the nearest to i / fps), and its first num_frames are used.",
    )
    strength: float = setting(
        0.8,
        "Video to video: share of the steps that run, from 0 (none) to 1 (the video has no "
        "effect).",
        Number(above=0, maximum=1),
    )
    mask_path: str = setting(
        "",
        "VACE: mask of `video_path`, of its size and number of frames; white is made, black is "
        "kept. Empty = all white.",
    )
    reference_images: tuple[str, ...] = setting(
        (), "VACE: images of what the video shall show.", ListOf(Text())
    )
    conditioning_scale: float | tuple[float, ...] = setting(
        1.0,
        "VACE: strength of the control; a list has one for each control block.",
        NumberOrNumbers(),
    )
    mode: str = setting(
        "animate",
        "Animate: animate the character, or let it replace a person of background_video_path.",
        Choice(("animate", "replace")),
    )
    reference_image_path: str = setting("", "Animate: image of the character.")
    pose_video_path: str = setting(
        "", "Animate: video of poses, resampled to `fps`; the result has as many frames."
    )
    face_video_path: str = setting("", "Animate: video of the face.")
    background_video_path: str = setting("", "Animate, replace: video of the background.")
    mask_video_path: str = setting(
        "", "Animate, replace: mask of the background; white is made, black is kept."
    )
    segment_frame_length: int = setting(
        77,
        "Animate: frames of a segment, 4n + 1; `num_frames` is not used.",
        Integer(minimum=5, step=4, offset=1),
    )
    prev_segment_conditioning_frames: int = setting(
        1,
        "Animate: frames that a segment takes over from the one before, 1 or 5.",
        Integer(minimum=1, maximum=5, step=4, offset=1),
    )
    motion_encode_batch_size: int | None = setting(
        None,
        "Animate: faces that the motion encoder reads at once, at least one per device; the result "
        "does not depend on it. null = 8, the checkpoint's.",
        Nullable(Integer(minimum=1)),
    )
    animate_guidance_scale: float = setting(
        1.0, "Animate: strength of guidance; up to 1 turns it off."
    )


@field_group
class QualityFields:
    """Networks that compare_quality measures with, besides its own figures."""

    lpips_weights: str = setting(
        "",
        "compare_quality: .safetensors file with the tensors of lpips.LPIPS(net='alex'); empty = "
        "no LPIPS.",
    )
    vbench_weights: str = setting(
        "",
        "compare_quality: folder of VBench's weights (its VBENCH_CACHE_DIR), where the package "
        "vbench is installed; empty = no VBench.",
    )


@field_group
class TrainingImageFields:
    """Conditions of a training that come from the first frames of clips."""

    train_image_conditioning: str = setting(
        "auto",
        "Input of the first frame: none (text to video), as channels (WAN 2.2 I2V), or as known "
        "latent frame (TI2V-5B); auto = that of the model.",
        Choice(("auto", "none", "channels", "first_frame")),
    )
    first_frame_dropout: float = setting(
        0.1,
        "first_frame: share of clips that are trained as text to video.",
        Number(minimum=0, maximum=1),
    )


@field_group
class TrainingLoraFields:
    """Adapters that a training learns in place of the weights."""

    train_lora: bool = setting(
        False, "Train LoRA adapters of the transformers; all weights of the model are frozen."
    )
    train_lora_rank: int = setting(16, "Rank of every adapter.", POSITIVE)
    train_lora_alpha: float | None = setting(
        None,
        "Adapters are scaled by this / train_lora_rank; null = the rank, so that the scale is 1.",
        Nullable(Number(above=0)),
    )
    train_lora_modules: tuple[str, ...] = setting(
        ("to_q", "to_k", "to_v", "to_out.0"),
        "Linear maps of every block that get an adapter: the ends of diffusers' names, such as "
        "to_q, attn1.to_q, ffn.net.0.proj or ffn.net.2.",
        ListOf(Text()),
    )
    train_lora_from: str = setting(
        "",
        "LoRA file to start from, or a folder that an earlier training exported; empty = new "
        "adapters, which change nothing at first.",
    )


@field_group
class TrainingWatchFields:
    """Reading of clips while a training runs, and its evaluation on held-out ones."""

    data_threads: int = setting(
        4,
        "Batches that are read ahead, each by a thread; the order stays the same.",
        POSITIVE,
    )
    eval_every: int = setting(
        -1, "Steps between evaluations on held-out clips; -1 = none.", Integer(minimum=-1)
    )
    eval_data_dir: str = setting(
        "",
        "Folder of held-out clips, in the form of train_data_dir; synthetic clips need none.",
    )
    num_eval_samples: int = setting(420, "Held-out clips of an evaluation, at most.", POSITIVE)


@field_group
class TrainingMemoryFields:
    """Format and place of the optimizer state: moments, and running means of the weights."""

    moments_dtype: str = setting(
        "float32",
        "Format of Adam's moments; bfloat16, and int8 with a scale for each 128, are lossy.",
        Choice(("float32", "bfloat16", "int8")),
    )
    optimizer_state_sharding: str = setting(
        "weights",
        "Shard moments and running means as the weights, or over data and context too (all).",
        Choice(("weights", "all")),
    )
    optimizer_state_memory: str = setting(
        "device",
        "Memory of moments and running means between steps: of the device, or of its host.",
        Choice(("device", "pinned_host")),
    )
    idle_expert_memory: str = setting(
        "device",
        "train_experts=both: memory of everything of the expert that is not trained in a step.",
        Choice(("device", "pinned_host")),
    )
    expert_turn_steps: int = setting(
        1,
        "train_experts=both: steps of an expert in a row; its share of all steps stays.",
        POSITIVE,
    )


@field_group
class ServingFields:
    """Address, queue, sizes, limits and storage of serve_wan."""

    serve_host: str = setting(
        "127.0.0.1", "Address that serve_wan listens on; beyond this machine a key is required."
    )
    serve_port: int = setting(
        8000, "Port of serve_wan; 0 takes a free one.", Integer(minimum=0, maximum=65535)
    )
    serve_dir: str = setting("serve", "Folder of the queue, its state and unfinished work.")
    serve_database_url: str = setting(
        "",
        "Queue shared by several servers, such as postgresql+psycopg://user@host/name; empty = a "
        "file in serve_dir.",
    )
    serve_sizes: tuple[str, ...] = setting(
        (),
        "Sizes WIDTHxHEIGHTxFRAMES that are compiled before the server is ready; empty = the one "
        "of width, height and num_frames.",
        ListOf(Text()),
    )
    serve_other_sizes: str = setting(
        "refuse",
        "Requests of other sizes: refuse them with the list, or compile in the background when "
        "they come.",
        Choice(("refuse", "compile")),
    )
    serve_presets: FrozenDict[object] = setting(
        NO_PRESETS,
        "Named sets of values that a request may ask for by `preset`, such as {four_step: "
        "{num_inference_steps: 4, scheduler: euler}}; fields of requests, and "
        "denoising_step_list, sigmas, boundary_step_index, guidance_end_step.",
        Table(),
    )
    serve_keys_file: str = setting(
        "",
        "File of API keys, one `name:key` per line; the variable MAXDIFFUSION_API_KEYS has the "
        "same lines. Empty = no keys.",
    )
    serve_allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names that clients may use for this server; empty = those of this machine, or any "
        "where keys are required.",
        ListOf(Text()),
    )
    serve_max_queue: int = setting(1000, "Jobs that may wait or run; more are refused.", POSITIVE)
    serve_max_jobs_per_key: int = setting(
        1000, "Jobs of one key that may wait or run; more are refused.", POSITIVE
    )
    serve_max_steps: int = setting(200, "Most denoise steps of a request.", POSITIVE)
    serve_max_upload_bytes: int = setting(
        20_000_000, "Most bytes in the body of a request.", Integer(minimum=1000)
    )
    serve_max_input_pixels: int = setting(
        500_000_000, "Most pixels of all frames of a video that a request brings.", POSITIVE
    )
    serve_keep_hours: float = setting(
        168.0,
        "Hours that finished jobs and their videos are kept; 0 = for ever.",
        Number(minimum=0),
    )
    serve_keep_bytes: int = setting(
        0,
        "Most bytes of finished videos; the oldest are deleted first. 0 = no limit.",
        NON_NEGATIVE,
    )
    serve_free_bytes: int = setting(
        1_000_000_000, "New jobs are refused while the disk has less free space.", NON_NEGATIVE
    )
    serve_attempts: int = setting(
        3, "Starts of a job that ends the whole server; then it has failed.", POSITIVE
    )
    serve_lease_seconds: int = setting(
        60,
        "With serve_database_url: a job whose server gives no sign for this long goes back to the "
        "queue.",
        Integer(minimum=2),
    )
    serve_stop_seconds: int = setting(
        25, "Seconds from SIGTERM to the end; a step that takes longer is given up.", POSITIVE
    )


def stated_inputs(config: "Config") -> dict[str, str | tuple[str, ...]]:
    """Returns the images and videos that a config states, by field; empty ones are not given."""
    return {
        "image_url": config.image_url,
        "last_image_path": config.last_image_path,
        "video_path": config.video_path,
        "mask_path": config.mask_path,
        "reference_images": config.reference_images,
        "reference_image_path": config.reference_image_path,
        "pose_video_path": config.pose_video_path,
        "face_video_path": config.face_video_path,
        "background_video_path": config.background_video_path,
        "mask_video_path": config.mask_video_path,
    }

"""Every field of a config with its type, default and meaning, in groups.

A new field is one `setting` here and the code that reads it: loading, `print_config`, error
messages and docs/configuration.md follow from the declaration. Public keys that this program does
not act on are data in `compat.py`. Fields of inputs and of the server are in `job_fields.py`.
"""

from collections.abc import Mapping

from maxdiffusion.config.fields import (
    Boolean,
    Choice,
    FrozenDict,
    Integer,
    ListOf,
    Nullable,
    Number,
    Table,
    Text,
    TextOrTexts,
    field_group,
    setting,
)
from maxdiffusion.config.job_fields import (
    InputFields,
    QualityFields,
    QuantizationFields,
    ServingFields,
    StepFields,
    TrainingImageFields,
    TrainingLoraFields,
    TrainingMemoryFields,
    TrainingWatchFields,
)

POSITIVE = Integer(minimum=1)
NON_NEGATIVE = Integer(minimum=0)
SIZE = Integer(minimum=1, special=(-1,))
NON_NEGATIVE_NUMBER = Number(minimum=0)
FRACTION = Number(minimum=0, maximum=1)
COUNT_OR_NONE = Integer(minimum=0, special=(-1,))
DTYPE = Choice(("float32", "bfloat16"))
REMAT_POLICIES = Choice(
    (
        "NONE",
        "FULL",
        "MATMUL_WITHOUT_BATCH",
        "OFFLOAD_MATMUL_WITHOUT_BATCH",
        "CUSTOM",
        "HIDDEN_STATE_WITH_OFFLOAD",
        "ATTENTION",
    )
)
PIXELS_16 = Integer(minimum=16, step=16)
PIXELS_8 = Integer(minimum=16, step=8)

# Queries are on sublanes (8) or lanes (128) depending on the kernel, keys always on lanes; the
# attention plan applies the rule of each kernel.
QUERIES = Integer(minimum=8, step=8)
KEYS = Integer(minimum=128, step=128)
BLOCK_SIZES = Table[int](
    {
        "block_q": QUERIES,
        "block_kv": KEYS,
        "block_kv_compute": KEYS,
        "block_kv_compute_in": KEYS,
        "heads_per_tile": POSITIVE,
        "vmem_limit_bytes": POSITIVE,
        "block_q_dkv": QUERIES,
        "block_kv_dkv": KEYS,
        "block_kv_dkv_compute": KEYS,
        "block_q_dq": QUERIES,
        "block_kv_dq": KEYS,
        "use_fused_bwd_kernel": Boolean(),
    }
)

TEXTS = ListOf(Text())
NUMBERS = ListOf(Number())
LORA_CONFIG = Table[object](
    {
        "lora_model_name_or_path": TEXTS,
        "weight_name": TEXTS,
        "high_noise_weight_name": TEXTS,
        "low_noise_weight_name": TEXTS,
        "adapter_name": TEXTS,
        "scale": NUMBERS,
        "high_noise_scale": NUMBERS,
        "low_noise_scale": NUMBERS,
        # Of public files; the tensors say both.
        "rank": ListOf(Integer()),
        "from_pt": ListOf(Boolean()),
    }
)
NO_LORA: FrozenDict[object] = FrozenDict()
NO_BLOCK_SIZES: FrozenDict[int] = FrozenDict()

PROMPT = (
    "A red fox trots along a snowy forest path at dawn, its breath visible in the cold air, while "
    "low sunlight falls between the trees."
)
NEGATIVE_PROMPT = (
    "overexposed, washed-out colours, frozen motion, out of focus, captions, watermark, "
    "compression artefacts, low resolution, malformed hands, extra fingers, distorted faces, "
    "cluttered background, people walking backwards"
)


@field_group
class ConfigFileFields:
    """Config files, and whether the result is printed."""

    base_config: str | None = setting(
        None,
        "YAML or Python file, relative to this one; its values apply where this one has none.",
        Nullable(Text()),
    )
    print_config: bool = setting(
        False, "Print the resolved config with the source of each value, and stop."
    )


@field_group
class ModelFields:
    """The model and the source of its weights."""

    pretrained_model_name_or_path: str = setting(
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "A diffusers folder, a hub id, or a model of the package: `embedded`, `embedded_image`.",
    )
    model_name: str = setting(
        "wan2.2",
        "Release of the model: its guidance keys and the number of its experts.",
        Choice(("wan2.1", "wan2.2")),
    )
    model_type: str = setting(
        "T2V",
        "Text-to-video or image-to-video, as the checkpoint is; WAN 2.2 TI2V-5B is both.",
        Choice(("T2V", "I2V")),
    )
    wan_transformer_pretrained_model_name_or_path: str = setting(
        "",
        "Other weights for the transformer: a file, a folder, or a place on the hub, with original "
        "or diffusers tensor names (docs/checkpoints.md); empty = those of the model.",
    )
    wan_transformer_2_pretrained_model_name_or_path: str = setting(
        "",
        "The same for the low-noise expert, where the key above does not name a folder with both.",
    )
    enable_lora: bool = setting(
        False, "Fuse the LoRA files of lora_config into the transformers while they load."
    )
    lora_config: FrozenDict[object] = setting(
        NO_LORA,
        "LoRA files, one entry per file in each list: lora_model_name_or_path (file, folder or hub "
        "id), weight_name or high_noise_weight_name and low_noise_weight_name, scale or "
        "high_noise_scale and low_noise_scale, adapter_name (docs/lora.md).",
        LORA_CONFIG,
    )
    lora_strict: bool = setting(
        True, "Refuse a LoRA file with tensors that the model has no place for; false lists them."
    )
    lora_rank: int = setting(
        0,
        "Rank kept free in every block for adapters that change between videos (Python methods, "
        "server); 0 = such adapters are fused. serve_wan then takes strengths with requests.",
        NON_NEGATIVE,
    )
    pretrained_orbax_dir: str = setting(
        "", "Folder of converted weights for faster loads; the first run fills it."
    )
    scan_layers: bool = setting(
        True, "Compile one transformer block and loop over it; false compiles every block."
    )
    max_sequence_length: int = setting(
        512, "Text tokens per prompt; longer prompts are truncated.", POSITIVE
    )


@field_group
class SamplingFields:
    """Prompts, the size of the video and the sampler."""

    prompt: str | tuple[str, ...] = setting(
        PROMPT, "Text of the video; a list makes one job of several prompts.", TextOrTexts()
    )
    prompts_file: str = setting(
        "",
        "Text file with one prompt per line, or JSON lines with prompt, image, last_image, video, "
        "mask, reference_images, seed, height, width, num_frames; empty = none.",
    )
    negative_prompt: str = setting(NEGATIVE_PROMPT, "Text that guidance steers away from.")
    seed: int = setting(0, "Seed of a prompt's first video.", Integer(minimum=0, maximum=2**32 - 1))
    num_videos: int | None = setting(
        None,
        "Videos per prompt, with seeds seed, seed+1, ...; null = one batch of them.",
        Nullable(POSITIVE),
    )
    per_device_batch_size: float | None = setting(
        None,
        "Videos per batch = devices x this, rounded down; null = one video per batch.",
        Nullable(Number(above=0)),
    )
    height: int = setting(720, "Rows of the video, in pixels.", PIXELS_16)
    width: int = setting(1280, "Columns of the video, in pixels.", PIXELS_16)
    num_frames: int = setting(81, "Frames of the video.", Integer(minimum=1, step=4, offset=1))
    fps: int = setting(16, "Frames per second of the file.", POSITIVE)
    num_inference_steps: int = setting(40, "Denoise steps.", POSITIVE)
    scheduler: str = setting(
        "unipc",
        "Sampler for flow matching: unipc (order 2, bh2), euler, dpmpp_2m, lcm (new noise at every "
        "step, also for DMD models) or euler_stochastic (the same).",
    )
    flow_shift: float = setting(
        12.0, "Shift of the noise schedule towards high noise.", Number(above=0)
    )
    guidance_scale: float | None = setting(
        None,
        "wan2.1: strength of guidance, null = 5; up to 1 turns it off. wan2.2 has two scales.",
        Nullable(Number()),
    )
    guidance_scale_high: float = setting(
        4.0, "wan2.2: strength of guidance with the high-noise expert; up to 1 turns it off."
    )
    guidance_scale_low: float = setting(
        3.0, "wan2.2: strength of guidance with the low-noise expert; up to 1 turns it off."
    )
    boundary_ratio: float = setting(
        0.875, "wan2.2: the high-noise expert runs while timestep >= this x 1000.", FRACTION
    )


@field_group
class OutputFields:
    """Files that a run writes."""

    output_dir: str = setting("outputs", "Folder for videos.")
    output_name: str = setting(
        "wan_output_{seed}_{i}.mp4",
        "Name of a video; {seed} is `seed`, {i} counts the videos of the job from 0.",
    )
    embed_metadata: bool = setting(
        True, "Write prompt, seed and settings into the video's metadata."
    )
    timing_file: str = setting("", "JSON file for the seconds of every stage; empty = none.")


@field_group
class NumberFields:
    """Number formats of weights and arithmetic."""

    weights_dtype: str = setting(
        "bfloat16",
        "Transformer weights; norms, embedders and modulation tables stay float32.",
        DTYPE,
    )
    activations_dtype: str = setting("bfloat16", "Arithmetic of the transformer.", DTYPE)
    text_encoder_dtype: str = setting("bfloat16", "Weights and arithmetic of UMT5.", DTYPE)
    vae_weights_dtype: str = setting("float32", "Weights of the VAE.", DTYPE)
    vae_dtype: str = setting("float32", "Arithmetic of the VAE.", DTYPE)
    precision: str = setting(
        "DEFAULT",
        "jax's matmul precision; HIGHEST makes float32 matmuls exact on TPUs.",
        Choice(("DEFAULT", "HIGH", "HIGHEST")),
    )


@field_group
class AttentionFields:
    """Context-parallel scheme, kernel and block sizes of self-attention."""

    attention: str = setting(
        "flash",
        "Context-parallel scheme and kernel of self-attention; auto = the fastest by estimate.",
    )
    flash_block_sizes: FrozenDict[int] = setting(
        NO_BLOCK_SIZES,
        "Block sizes of the attention kernel; omitted ones come from the tuned table. The kernels "
        "of tokamax always fuse their backward pass.",
        BLOCK_SIZES,
    )
    flash_min_seq_length: int = setting(
        4096,
        "With fewer queries or keys (text has 512) flash, tokamax_flash, ulysses, ulysses_custom, "
        "ulysses_custom_fixed_m and ulysses_ring run dot_product; 0 = never.",
        NON_NEGATIVE,
    )
    ulysses_shards: int = setting(
        -1,
        "Part of the context that splits heads; the rest is a ring. -1 = as heads allow.",
        SIZE,
    )
    ulysses_attention_chunks: int = setting(
        1, "Head groups whose all-to-all overlaps the attention of other groups.", POSITIVE
    )
    use_base2_exp: bool = setting(True, "Softmax with powers of two in kernels that support it.")
    use_experimental_scheduler: bool = setting(
        False, "Compile our kernels with the LP instruction scheduler of the TPU compiler."
    )
    report_fast_heads: bool = setting(
        False,
        "Print how many heads take the fast path of fixed-m softmax at the first and last step.",
    )
    enable_tile_search: bool = setting(
        False,
        "Before the run, time block sizes of every kernel and use the fastest, unless "
        "tuned_blocks_file has them.",
    )
    tile_search_mode: str = setting(
        "smart",
        "Candidates: a grid of block sizes; full adds smaller score tiles and head pairs.",
        Choice(("smart", "full")),
    )
    tile_search_iters: int = setting(10, "Timed runs of every tile.", POSITIVE)
    tile_search_out: str = setting(
        "",
        "Folder for the search's table (a later search resumes from it) and plots; empty = none.",
    )
    tuned_blocks_file: str = setting(
        "",
        "JSON file of block sizes that a search found; runs use them where flash_block_sizes has "
        "none. Empty = none.",
    )


@field_group
class DeviceFields:
    """Sizes of the mesh within a slice (ici) and across slices (dcn); -1 takes the rest."""

    ici_data_parallelism: int = setting(
        1,
        "Devices within a slice that split the batch (with guidance 2: prompt, negative prompt).",
        SIZE,
    )
    ici_fsdp_parallelism: int = setting(
        1, "Devices within a slice that shard the weights, gathered layer by layer.", SIZE
    )
    ici_context_parallelism: int | None = setting(
        None,
        "Devices within a slice that split a sequence: ring x ulysses; null = those left over.",
        Nullable(SIZE),
    )
    ici_ring_parallelism: int | None = setting(
        None,
        "Part of ici_context_parallelism with ring attention; null = from the context.",
        Nullable(SIZE),
    )
    ici_ulysses_parallelism: int | None = setting(
        None,
        "Part of ici_context_parallelism with Ulysses; null = from the context.",
        Nullable(SIZE),
    )
    ici_tensor_parallelism: int = setting(
        1, "Devices within a slice that split heads and the hidden dimension of MLPs.", SIZE
    )
    dcn_data_parallelism: int = setting(
        1, "Slices that split the batch (with guidance 2: prompt, negative prompt).", SIZE
    )
    dcn_fsdp_parallelism: int = setting(
        1, "Slices that shard the weights, gathered layer by layer.", SIZE
    )
    dcn_context_parallelism: int | None = setting(
        None,
        "Slices that split a sequence: ring x ulysses; null = those left over.",
        Nullable(SIZE),
    )
    dcn_ring_parallelism: int | None = setting(
        None,
        "Part of dcn_context_parallelism with ring attention; null = from the context.",
        Nullable(SIZE),
    )
    dcn_ulysses_parallelism: int | None = setting(
        None,
        "Part of dcn_context_parallelism with Ulysses; null = from the context.",
        Nullable(SIZE),
    )
    dcn_tensor_parallelism: int = setting(
        1, "Slices that split heads and the hidden dimension of MLPs.", SIZE
    )
    weight_placement: str = setting(
        "auto",
        "Weights of the blocks: replicate or shard over the context; auto = replicate if they fit.",
        Choice(("auto", "replicate", "shard")),
    )


@field_group
class StartUpFields:
    """Caches, processes, compiler flags and profiles."""

    jax_cache_dir: str = setting("", "Folder of jax's persistent compilation cache; empty = none.")
    aot_cache_dir: str = setting(
        "",
        "Folder of compiled programs, filled by runs and preflight_wan; empty = none.",
    )
    prompt_embeddings_cache_dir: str = setting(
        "",
        "Folder of prompt embeddings; a run that finds all of its prompts there does not load the "
        "text encoder. Empty = none.",
    )
    jax_coordinator_address: str = setting(
        "", "host:port of the first process of a job with several; empty = found by jax."
    )
    jax_num_processes: int | None = setting(
        None, "Number of processes of a job with several; null = found by jax.", Nullable(POSITIVE)
    )
    jax_process_id: int | None = setting(
        None,
        "Which process of a job with several this one is; null = found by jax.",
        Nullable(NON_NEGATIVE),
    )
    skip_jax_distributed_system: bool = setting(
        False, "Run this process alone, even where jax finds others."
    )
    jax_distributed_initialization_timeout: int = setting(
        300, "Seconds that a process waits for the others at the start of a job.", POSITIVE
    )
    jax_distributed_heartbeat_timeout_seconds: int = setting(
        100,
        "Seconds without a heartbeat after which jax ends a job; after half of them the watchdog "
        "names the dead process and ends the job.",
        Integer(minimum=10),
    )
    hang_timeout_seconds: int = setting(
        1800,
        "Seconds that a process may stay at one stage (compiling is one) before the job ends.",
        POSITIVE,
    )
    libtpu_init_args: str = setting(
        "auto",
        "Flags of the TPU compiler: auto = those for overlap on this chip, none, or flags; the "
        "variable LIBTPU_INIT_ARGS has precedence.",
    )
    tpu_pin_clock: bool = setting(
        False,
        "Keep tpu7x chips at their highest clock (--xla_tpu_dvfs_p_state=7): about 12 % less time, "
        "as published. Not for hosts that are shared with other jobs.",
    )
    enable_profiler: bool = setting(
        False, "Write a profile of a few denoise or training steps to output_dir/profile/host_N."
    )
    skip_first_n_steps_for_profiler: int = setting(
        5, "Steps before the profile begins.", NON_NEGATIVE
    )
    profiler_steps: int = setting(
        10, "Steps in the profile; the profile ends at the latest with the last step.", POSITIVE
    )


@field_group
class PreflightFields:
    """Target and outputs of preflight_wan."""

    topology: str = setting(
        "", "TPU slice that preflight_wan compiles for, such as tpu7x:2x2x1 or v6e:2x4."
    )
    report: str = setting("", "JSON file that preflight_wan writes its report to; empty = none.")
    compare: tuple[str, ...] = setting(
        (),
        "Attentions that preflight_wan ranks: names, or name:UxR with the split of the context.",
        ListOf(Text()),
    )
    scan_cp: tuple[int, ...] = setting(
        (),
        "Context sizes for which preflight_wan estimates the cost, such as [4, 8, 16].",
        ListOf(POSITIVE),
    )


@field_group
class VaeFields:
    """Chunks, tiles and devices of the VAE."""

    vae_decode_chunk: int = setting(
        0, "Latent frames decoded at once; 0 = what 256 MiB allow, -1 = all.", COUNT_OR_NONE
    )
    vae_spatial: int = setting(
        -1, "Devices that split the rows and columns of a frame; -1 = all of them.", SIZE
    )
    vae_tiling: bool = setting(False, "Decode in overlapping tiles that are blended.")
    vae_tile_height: int = setting(256, "Rows of a tile, in pixels.", PIXELS_8)
    vae_tile_width: int = setting(256, "Columns of a tile, in pixels.", PIXELS_8)
    vae_tile_stride_height: int = setting(192, "Rows from one tile to the next.", PIXELS_8)
    vae_tile_stride_width: int = setting(192, "Columns from one tile to the next.", PIXELS_8)


@field_group
class TrainingFields:
    """Optimizer, loss, checkpoints and results of a training run."""

    learning_rate: float = setting(1e-5, "Learning rate of AdamW.", NON_NEGATIVE_NUMBER)
    warmup_steps_fraction: float = setting(0.1, "Share of steps with a rising rate.", FRACTION)
    learning_rate_schedule_steps: int = setting(
        -1, "Length of the rate's schedule; -1 = max_train_steps.", COUNT_OR_NONE
    )
    adam_b1: float = setting(0.9, "AdamW: decay of the first moment.", FRACTION)
    adam_b2: float = setting(0.999, "AdamW: decay of the second moment.", FRACTION)
    adam_eps: float = setting(1e-8, "AdamW: added to the denominator.", NON_NEGATIVE_NUMBER)
    adam_weight_decay: float = setting(0.0, "AdamW: weight decay.", NON_NEGATIVE_NUMBER)
    opt_enable_grad_clipping: bool = setting(False, "Clip gradients by value.")
    max_grad_value: float = setting(1.0, "Limit of gradient values.", NON_NEGATIVE_NUMBER)
    opt_enable_grad_global_norm_clipping: bool = setting(False, "Clip by global norm.")
    max_grad_norm: float = setting(1.0, "Norm that gradients are clipped to.", NON_NEGATIVE_NUMBER)
    max_train_steps: int = setting(1500, "Training steps.", NON_NEGATIVE)
    global_batch_size: int = setting(0, "Samples per step over all devices.", NON_NEGATIVE)
    remat_policy: str = setting(
        "NONE", "Which activations the backward pass recomputes.", REMAT_POLICIES
    )
    names_which_can_be_saved: tuple[str, ...] = setting(
        (), "CUSTOM remat: activations that are saved.", ListOf(Text())
    )
    names_which_can_be_offloaded: tuple[str, ...] = setting(
        (), "CUSTOM remat: activations offloaded to the host.", ListOf(Text())
    )
    disable_training_weights: bool = setting(False, "Do not weight the loss by timestep.")
    train_text_encoder: bool = setting(False, "Train the text encoder as well.")
    text_encoder_learning_rate: float = setting(
        4.25e-6, "Learning rate of the text encoder.", NON_NEGATIVE_NUMBER
    )
    checkpoint_every: int = setting(-1, "Steps between checkpoints; -1 = none.", COUNT_OR_NONE)
    checkpoint_dir: str = setting("", "Folder of training checkpoints.")
    metrics_file: str = setting("", "JSON-lines file for training metrics.")
    learning_rate_decay: str = setting(
        "constant", "Learning rate after the warm-up.", Choice(("constant", "cosine"))
    )
    ema_decay: float = setting(0.999, "Decay of the moving average of the weights.", FRACTION)
    gradient_accumulation_steps: int = setting(1, "Micro-batches per batch.", POSITIVE)
    caption_dropout: float = setting(0.1, "Share of captions replaced by the empty one.", FRACTION)
    train_experts: str = setting(
        "both",
        "Train both experts of wan2.2 in turn, one network for all noise levels, or one expert.",
        Choice(("both", "shared", "high_noise", "low_noise")),
    )
    train_from_scratch: bool = setting(
        False, "Start from random weights (`seed`) of the model's sizes."
    )
    keep_checkpoints: int = setting(2, "Newest checkpoints that are not deleted.", POSITIVE)
    sample_every: int = setting(0, "Steps between sample videos; 0 = none.", NON_NEGATIVE)
    tensorboard_dir: str = setting("", "Folder for TensorBoard; empty = none.")
    export_dir: str = setting("", "Folder that the trained model is written to; empty = none.")


@field_group
class TrainingDataFields:
    """Clips that training reads."""

    dataset_type: str = setting(
        "tfrecord", "`synthetic` (moving shapes), `videos` (a folder), or `tfrecord` (encoded)."
    )
    train_data_dir: str = setting("", "Folder of videos or images with captions, or of records.")
    cache_latents_text_encoder_outputs: bool = setting(
        True, "Store text embeddings with the latents, unless the text encoder is trained."
    )
    enable_data_shuffling: bool = setting(True, "Shuffle the data.")
    latent_cache_dir: str = setting("", "Folder of encoded clips; the first run fills it.")
    video_buckets: tuple[tuple[int, ...], ...] = setting(
        (),
        "Sizes `[[frames, height, width], ...]` that videos are sorted into; empty = the one "
        "of num_frames, height and width.",
        ListOf(ListOf(POSITIVE)),
    )
    synthetic_clips: int = setting(16384, "Number of synthetic clips.", POSITIVE)
    synthetic_pair_share: float = setting(
        0.0, "Share of synthetic clips that show two shapes.", FRACTION
    )
    synthetic_window: int = setting(
        0,
        "Side in pixels of the crop that the autoencoder trains on; 0 = whole clips.",
        Integer(minimum=16, special=(0,)),
    )


# Titles of the groups in docs/configuration.md and in the printed config.
GENERATION_GROUPS: Mapping[str, type] = {
    "Config files": ConfigFileFields,
    "Model": ModelFields,
    "Prompts and sampling": SamplingFields,
    "Steps": StepFields,
    "Images and videos": InputFields,
    "Output": OutputFields,
    "Numbers": NumberFields,
    "8-bit weights": QuantizationFields,
    "Attention": AttentionFields,
    "Devices": DeviceFields,
    "Start-up and compilation": StartUpFields,
    "Preflight": PreflightFields,
    "Quality": QualityFields,
    "VAE": VaeFields,
    "Serving": ServingFields,
}
TRAINING_GROUPS: Mapping[str, type] = {
    "Training": TrainingFields,
    "Training data": TrainingDataFields,
    "Training on first frames": TrainingImageFields,
    "Training of LoRA adapters": TrainingLoraFields,
    "Reading and evaluation": TrainingWatchFields,
    "Memory of a training": TrainingMemoryFields,
}

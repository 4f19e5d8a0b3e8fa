"""Keys of public WAN config files that this program does not act on, as data.

A key without meaning is accepted and named in one line at start-up. A refused key requests a
feature that this program does not have: its default runs, any other value loads and prints but does
not run.
"""

from collections.abc import Mapping
from types import MappingProxyType

from maxdiffusion.config.fields import (
    AnyList,
    Effect,
    Field,
    FrozenDict,
    Integer,
    Kind,
    ListOf,
    Secret,
    Text,
    implied_kind,
)
from maxdiffusion.config.schema import (
    COUNT_OR_NONE,
    DTYPE,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    SIZE,
)


def ignored(name: str, default: object, meaning: str, *, kind: Kind[object] | None = None) -> Field:
    """Returns a key without meaning here."""
    accepted = implied_kind(default) if kind is None else kind
    return Field(
        name=name, kind=accepted, default=default, meaning=meaning, effect=Effect.NO_MEANING
    )


def refused(
    name: str, default: object, meaning: str, *, way_out: str, kind: Kind[object] | None = None
) -> Field:
    """Returns a key that runs at its default only."""
    accepted = implied_kind(default) if kind is None else kind
    return Field(
        name=name,
        kind=accepted,
        default=default,
        meaning=meaning,
        effect=Effect.REFUSED,
        way_out=way_out,
    )


EMPTY: FrozenDict[object] = FrozenDict()

ROWS = (
    # Model
    refused(
        "revision",
        "",
        "Revision of a hub id; empty = its main one.",
        way_out="Download that revision and give its folder as pretrained_model_name_or_path",
    ),
    refused(
        "converted_weights_dir",
        "",
        "Folder of converted weights as npy files; empty = none.",
        way_out="Set pretrained_orbax_dir instead",
    ),
    ignored("compile_text_encoder", False, "torch.compile for UMT5; it always runs in jax."),
    ignored(
        "use_batched_text_encoder",
        False,
        "Encode prompt and negative prompt in one call; the embeddings are the same.",
    ),
    ignored("use_kv_cache", False, "Project text keys and values once per prompt; always done."),
    ignored("unet_checkpoint", "", "Checkpoint of an image model's UNet."),
    ignored("from_pt", True, "Weights come from PyTorch; read from the files."),
    ignored("jit_initializers", True, "Make parameters inside jit; always done."),
    ignored("split_head_dim", True, "Split heads before attention; always done."),
    ignored("norm_num_groups", 32, "Groups of an image model's GroupNorm.", kind=POSITIVE),
    ignored("run_name", "", "Name of the run in log folders; videos go to output_dir."),
    # Prompts and sampling
    refused(
        "do_classifier_free_guidance",
        True,
        "Whether guidance is used at all.",
        way_out="Set guidance_scale (wan2.1) or guidance_scale_high and _low (wan2.2) to 1",
    ),
    refused(
        "guidance_rescale",
        0.0,
        "Rescaling of guided predictions; 0 = none.",
        way_out="Leave it at 0",
    ),
    ignored("prompt_2", "", "Second prompt of image models with two text encoders."),
    ignored(
        "scan_diffusion_loop",
        False,
        "Compile the loop over steps as one program; here each step is one.",
    ),
    # Output
    ignored("base_output_directory", "", "Cloud folder for saved configs."),
    ignored("save_config_to_gcs", False, "Save the config to a cloud folder."),
    ignored("timing_metrics_file", "", "Timing of image models; see timing_file."),
    ignored("write_timing_metrics", True, "Write timing of image models."),
    ignored("log_period", 100, "Steps between flushes of training logs.", kind=POSITIVE),
    refused(
        "enable_ssim", False, "Compare videos before and after training.", way_out="Leave it false"
    ),
    # Numbers
    refused(
        "scheduler_dtype",
        "float32",
        "Arithmetic of the sampler.",
        way_out="Leave it at 'float32'",
        kind=DTYPE,
    ),
    # Attention
    ignored("mask_padding_tokens", True, "Mask padded tokens; always done, it is exact."),
    ignored(
        "attention_sharding_uniform",
        True,
        "Split the sequence in self- and cross-attention alike; always done.",
    ),
    # Devices
    ignored(
        "allow_split_physical_axes",
        False,
        "Let a mesh axis use part of a torus axis; devices are ordered along neighbours.",
    ),
    ignored(
        "mesh_axes",
        ("data", "fsdp", "context", "tensor"),
        "Names of mesh axes; here always data, fsdp, ring, ulysses, tensor.",
        kind=ListOf(Text()),
    ),
    ignored("logical_axis_rules", (), "Mesh axes of logical dimensions.", kind=AnyList()),
    ignored(
        "vae_logical_axis_rules",
        (),
        "As logical_axis_rules, for the VAE; see vae_spatial.",
        kind=AnyList(),
    ),
    ignored(
        "data_sharding",
        (("data", "fsdp", "context", "tensor"),),
        "How a training batch is split.",
        kind=AnyList(),
    ),
    # Start-up and compilation
    refused(
        "compile_topology_num_slices",
        -1,
        "Number of absent slices to compile for; -1 = the slices present.",
        way_out="Leave it at -1",
        kind=SIZE,
    ),
    ignored("hardware", "tpu", "Kind of device; jax detects it."),
    ignored("enable_jax_named_scopes", False, "Finer names in a profile; always on."),
    refused(
        "enable_ml_diagnostics",
        False,
        "Report the run to Google Cloud ML diagnostics.",
        way_out="Leave it false",
    ),
    ignored("profiler_gcs_path", "", "Where ML diagnostics keeps profiles."),
    ignored("enable_ondemand_xprof", False, "Let ML diagnostics ask for profiles."),
    # VAE
    ignored(
        "vae_encode_chunk",
        4,
        "Frames encoded at once; -1 = all. Text-to-video encodes none.",
        kind=Integer(minimum=4, step=4, special=(-1,)),
    ),
    ignored("replicate_vae", False, "Replicate the VAE on every device; always done."),
    # Quantization
    ignored(
        "quantization_local_shard_count", -1, "Shards of a quantizer's range finding.", kind=SIZE
    ),
    ignored("qwix_module_path", ".*", "Which modules qwix quantizes; here all blocks."),
    ignored(
        "quantization_calibration_method",
        "absmax",
        "Calibration method of qwix; here always absmax.",
    ),
    ignored("weight_quantization_calibration_method", "absmax", "As above, for weights."),
    ignored("act_quantization_calibration_method", "absmax", "As above, for activations."),
    ignored("bwd_quantization_calibration_method", "absmax", "As above, for gradients."),
    # Training
    ignored("scale_lr", False, "Scale the learning rate with the batch."),
    ignored("max_train_samples", -1, "Samples to train on; -1 = all.", kind=COUNT_OR_NONE),
    ignored("num_train_epochs", 1, "Passes over the data.", kind=NON_NEGATIVE),
    ignored("dropout", 0.0, "Dropout in attention and MLPs while training.", kind=FRACTION),
    ignored("save_optimizer", False, "Keep the optimizer in checkpoints."),
    ignored("save_final_checkpoint", False, "Keep a checkpoint at the end."),
    ignored("enable_single_replica_ckpt_restoring", False, "One replica reads for all."),
    ignored("write_metrics", True, "Write training metrics."),
    ignored("gcs_metrics", False, "Write training metrics to a cloud folder."),
    ignored("enable_generate_video_for_eval", False, "Make videos in evaluations."),
    ignored("eval_max_number_of_samples_in_bucket", 60, "Samples per bucket.", kind=POSITIVE),
    ignored("enable_eval_timesteps", False, "Tag timesteps for evaluation."),
    ignored(
        "timesteps_list",
        (125, 250, 375, 500, 625, 750, 875),
        "Timesteps of evaluation buckets.",
        kind=ListOf(NON_NEGATIVE),
    ),
    ignored("enable_mllog", False, "Write MLPerf logs."),
    # Training data
    ignored("dataset_name", "", "Data set, as a hub id or a path."),
    ignored("dataset_config_name", "", "Configuration of a hub data set."),
    ignored("dataset_save_location", "", "Folder of prepared data."),
    ignored("train_split", "train", "Split of a hub data set."),
    ignored("load_tfrecord_cached", True, "Read records that were prepared."),
    ignored("tfrecords_dir", "", "Folder that records are written to."),
    ignored("no_records_per_shard", 0, "Records per file.", kind=NON_NEGATIVE),
    ignored("hf_data_dir", "", "Folder of a hub data set."),
    ignored("hf_train_files", "", "Files of a hub data set."),
    ignored("hf_access_token", "", "Token for a hub data set.", kind=Secret()),
    ignored("image_column", "image", "Column of images."),
    ignored("caption_column", "text", "Column of captions."),
    ignored("resolution", 1024, "Size of training images.", kind=POSITIVE),
    ignored("center_crop", False, "Crop images at their centre."),
    ignored("random_flip", False, "Mirror images at random."),
    ignored("tokenize_captions_num_proc", 4, "Processes that tokenize.", kind=POSITIVE),
    ignored("transform_images_num_proc", 4, "Processes that resize.", kind=POSITIVE),
    ignored("reuse_example_batch", False, "Train on the first batch only."),
    # Left over from image models
    ignored("snr_gamma", -1.0, "Loss weighting of image models."),
    ignored("timestep_bias", EMPTY, "Timestep weighting of image models."),
    ignored("diffusion_scheduler_config", EMPTY, "Scheduler of image models."),
    ignored("lightning_from_pt", True, "SDXL Lightning: weights come from PyTorch."),
    ignored("lightning_repo", "", "SDXL Lightning: repository."),
    ignored("lightning_ckpt", "", "SDXL Lightning: file."),
    ignored("controlnet_model_name_or_path", "", "ControlNet: model."),
    ignored("controlnet_from_pt", True, "ControlNet: weights come from PyTorch."),
    ignored("controlnet_conditioning_scale", 0.5, "ControlNet: strength."),
    ignored("controlnet_image", "", "ControlNet: image."),
)

COMPAT_FIELDS: Mapping[str, Field] = MappingProxyType({row.name: row for row in ROWS})

"""Keys about which model runs and where its weights come from."""

from maxdiffusion.config.kinds import Boolean, Choice, Integer, Text
from maxdiffusion.config.schema import refused, unused, used

KEYS = (
    used(
        "pretrained_model_name_or_path",
        Text(),
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "A diffusers folder, a hub id, or `embedded` for the small model shipped in the package.",
    ),
    used(
        "model_name",
        Choice(("wan2.1", "wan2.2")),
        "wan2.2",
        "wan2.1 has one transformer, wan2.2 a high-noise and a low-noise expert.",
    ),
    used(
        "model_type",
        Choice(("T2V", "I2V")),
        "T2V",
        "Text-to-video or image-to-video; I2V loads and prints, but does not run yet.",
    ),
    refused(
        "wan_transformer_pretrained_model_name_or_path",
        Text(),
        "",
        "Another source for the transformer alone; empty = the same as the rest.",
        way_out="Put the transformer into the folder of pretrained_model_name_or_path",
    ),
    refused(
        "revision",
        Text(),
        "",
        "Revision of a hub id; empty = its main one.",
        way_out="Download that revision and give its folder as pretrained_model_name_or_path",
    ),
    used(
        "pretrained_orbax_dir",
        Text(),
        "",
        "Folder that keeps converted weights for quicker loads; filled by the first run.",
    ),
    refused(
        "converted_weights_dir",
        Text(),
        "",
        "Folder of converted weights as npy files; empty = none.",
        way_out="Set pretrained_orbax_dir instead",
    ),
    used(
        "scan_layers",
        Boolean(),
        True,
        "Compile one transformer block and loop over it; false compiles every block.",
    ),
    used(
        "max_sequence_length",
        Integer(minimum=1),
        512,
        "Text tokens that the transformer sees; longer prompts are cut.",
    ),
    unused(
        "compile_text_encoder", Boolean(), False, "torch.compile for UMT5; it always runs in jax."
    ),
    unused(
        "use_batched_text_encoder",
        Boolean(),
        False,
        "Encode prompt and negative prompt in one call; the embeddings are the same.",
    ),
    unused("use_kv_cache", Boolean(), False, "Text keys and values once per prompt: always done."),
    unused("unet_checkpoint", Text(), "", "Checkpoint of an image model's UNet."),
    unused("from_pt", Boolean(), True, "Weights come from PyTorch; found from the files."),
    unused("jit_initializers", Boolean(), True, "Make parameters inside jit; always done."),
    unused("split_head_dim", Boolean(), True, "Split heads before attention; always done."),
    unused("norm_num_groups", Integer(minimum=1), 32, "Groups of an image model's GroupNorm."),
    unused("run_name", Text(), "", "Name of the run in log folders; videos go to output_dir."),
)

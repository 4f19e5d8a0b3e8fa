"""Keys of image models that public WAN files carry along: accepted, without meaning."""

from maxdiffusion.config.kinds import Boolean, Number, Text
from maxdiffusion.config.schema import Frozen, Table, unused

KEYS = (
    unused("snr_gamma", Number(), -1.0, "Loss weighting of image models."),
    unused("timestep_bias", Table(), Frozen(), "Timestep weighting of image models."),
    unused("diffusion_scheduler_config", Table(), Frozen(), "Scheduler of image models."),
    unused("lightning_from_pt", Boolean(), True, "SDXL Lightning: weights come from PyTorch."),
    unused("lightning_repo", Text(), "", "SDXL Lightning: repository."),
    unused("lightning_ckpt", Text(), "", "SDXL Lightning: file."),
    unused("controlnet_model_name_or_path", Text(), "", "ControlNet: model."),
    unused("controlnet_from_pt", Boolean(), True, "ControlNet: weights come from PyTorch."),
    unused("controlnet_conditioning_scale", Number(), 0.5, "ControlNet: strength."),
    unused("controlnet_image", Text(), "", "ControlNet: image."),
)

"""Keys about files that a run writes."""

from maxdiffusion.config.kinds import Boolean, Integer, Text
from maxdiffusion.config.schema import refused, unused, used

KEYS = (
    used("output_dir", Text(), "outputs", "Folder for videos."),
    used(
        "output_name",
        Text(),
        "wan_output_{seed}_{i}.mp4",
        "Name of a video; {seed} is `seed`, {i} counts the videos of the job from 0.",
    ),
    used(
        "embed_metadata",
        Boolean(),
        True,
        "Write prompt, seed and settings into the video's metadata.",
    ),
    used("timing_file", Text(), "", "JSON file for the seconds of every stage; empty = none."),
    unused("base_output_directory", Text(), "", "Cloud folder for saved configs."),
    unused("save_config_to_gcs", Boolean(), False, "Save the config to a cloud folder."),
    unused("timing_metrics_file", Text(), "", "Timing of image models; see timing_file."),
    unused("write_timing_metrics", Boolean(), True, "Write timing of image models."),
    unused("log_period", Integer(minimum=1), 100, "Steps between flushes of training logs."),
    refused(
        "enable_ssim",
        Boolean(),
        False,
        "Compare videos before and after training.",
        way_out="Leave it false",
    ),
)

"""Keys of training data, which generation does not look at."""

from maxdiffusion.config.kinds import Boolean, Integer, ListOf, Number, Secret, Text
from maxdiffusion.config.schema import trains, unused

KEYS = (
    unused("dataset_name", Text(), "", "Data set, as a hub id or a path."),
    trains(
        "dataset_type",
        Text(),
        "tfrecord",
        "`synthetic` (moving shapes), `videos` (a folder), or tfrecord (not read).",
    ),
    unused("dataset_config_name", Text(), "", "Configuration of a hub data set."),
    unused("dataset_save_location", Text(), "", "Folder of prepared data."),
    unused("train_split", Text(), "train", "Split of a hub data set."),
    trains("train_data_dir", Text(), "", "Folder of videos with captions."),
    trains(
        "cache_latents_text_encoder_outputs",
        Boolean(),
        True,
        "Keep text embeddings beside the latents, unless the text encoder is trained.",
    ),
    unused("load_tfrecord_cached", Boolean(), True, "Read records that were prepared."),
    unused("tfrecords_dir", Text(), "", "Folder that records are written to."),
    unused("no_records_per_shard", Integer(minimum=0), 0, "Records per file."),
    unused("hf_data_dir", Text(), "", "Folder of a hub data set."),
    unused("hf_train_files", Text(), "", "Files of a hub data set."),
    unused("hf_access_token", Secret(), "", "Token for a hub data set."),
    unused("image_column", Text(), "image", "Column of images."),
    unused("caption_column", Text(), "text", "Column of captions."),
    unused("resolution", Integer(minimum=1), 1024, "Size of training images."),
    unused("center_crop", Boolean(), False, "Crop images at their centre."),
    unused("random_flip", Boolean(), False, "Mirror images at random."),
    unused("tokenize_captions_num_proc", Integer(minimum=1), 4, "Processes that tokenize."),
    unused("transform_images_num_proc", Integer(minimum=1), 4, "Processes that resize."),
    unused("reuse_example_batch", Boolean(), False, "Train on the first batch again and again."),
    trains("enable_data_shuffling", Boolean(), True, "Shuffle the data."),
    trains(
        "latent_cache_dir",
        Text(),
        "",
        "Folder that encoded clips are kept in; filled by the first run.",
    ),
    trains(
        "video_buckets",
        ListOf(ListOf(Integer(minimum=1))),
        (),
        "Sizes `[[frames, height, width], ...]` that videos are sorted into; empty = the one of "
        "num_frames, height and width.",
    ),
    trains("synthetic_clips", Integer(minimum=1), 16384, "How many synthetic clips there are."),
    trains(
        "synthetic_pair_share",
        Number(minimum=0, maximum=1),
        0.0,
        "Share of synthetic clips that show two shapes.",
    ),
    trains(
        "synthetic_window",
        Integer(minimum=16, special=(0,)),
        0,
        "Pixels of the square around a shape that the autoencoder trains on; 0 = whole clips.",
    ),
)

"""Keys of training, which generation does not look at."""

from maxdiffusion.config.kinds import Boolean, Choice, Integer, ListOf, Number, Text
from maxdiffusion.config.schema import trains, unused

REMAT_POLICIES = Choice(
    (
        "NONE",
        "FULL",
        "MATMUL_WITHOUT_BATCH",
        "OFFLOAD_MATMUL_WITHOUT_BATCH",
        "CUSTOM",
        "HIDDEN_STATE_WITH_OFFLOAD",
    )
)
COUNT_OR_NONE = Integer(minimum=0, special=(-1,))
SHARE = Number(minimum=0, maximum=1)

KEYS = (
    trains("learning_rate", Number(minimum=0), 1e-5, "Learning rate of AdamW."),
    unused("scale_lr", Boolean(), False, "Scale the learning rate with the batch."),
    trains("warmup_steps_fraction", SHARE, 0.1, "Share of steps in which the rate rises."),
    trains(
        "learning_rate_schedule_steps",
        COUNT_OR_NONE,
        -1,
        "Length of the rate's schedule; -1 = max_train_steps.",
    ),
    trains("adam_b1", SHARE, 0.9, "AdamW: decay of the first moment."),
    trains("adam_b2", SHARE, 0.999, "AdamW: decay of the second moment."),
    trains("adam_eps", Number(minimum=0), 1e-8, "AdamW: added to the denominator."),
    trains("adam_weight_decay", Number(minimum=0), 0.0, "AdamW: weight decay."),
    trains("opt_enable_grad_clipping", Boolean(), False, "Clip gradients by value."),
    trains("max_grad_value", Number(minimum=0), 1.0, "Value that gradients are clipped to."),
    trains("opt_enable_grad_global_norm_clipping", Boolean(), False, "Clip by global norm."),
    trains("max_grad_norm", Number(minimum=0), 1.0, "Norm that gradients are clipped to."),
    unused("max_train_samples", COUNT_OR_NONE, -1, "Samples to train on; -1 = all."),
    trains("max_train_steps", Integer(minimum=0), 1500, "Training steps."),
    unused("num_train_epochs", Integer(minimum=0), 1, "Passes over the data."),
    trains("global_batch_size", Integer(minimum=0), 0, "Samples per step over all devices."),
    unused("dropout", SHARE, 0.0, "Dropout in attention and MLPs while training."),
    trains("remat_policy", REMAT_POLICIES, "NONE", "What the backward pass computes anew."),
    trains("names_which_can_be_saved", ListOf(Text()), (), "CUSTOM remat: what is kept."),
    trains("names_which_can_be_offloaded", ListOf(Text()), (), "CUSTOM remat: what goes to host."),
    trains("disable_training_weights", Boolean(), False, "No weighting of the loss by timestep."),
    trains("train_text_encoder", Boolean(), False, "Train the text encoder as well."),
    trains("text_encoder_learning_rate", Number(minimum=0), 4.25e-6, "Its learning rate."),
    trains("checkpoint_every", COUNT_OR_NONE, -1, "Steps between checkpoints; -1 = none."),
    trains("checkpoint_dir", Text(), "", "Folder of training checkpoints."),
    unused("save_optimizer", Boolean(), False, "Keep the optimizer in checkpoints."),
    unused("save_final_checkpoint", Boolean(), False, "Keep a checkpoint at the end."),
    unused("enable_single_replica_ckpt_restoring", Boolean(), False, "One replica reads for all."),
    trains("metrics_file", Text(), "", "File for training figures."),
    unused("write_metrics", Boolean(), True, "Write training figures."),
    unused("gcs_metrics", Boolean(), False, "Write training figures to a cloud folder."),
    unused("eval_every", COUNT_OR_NONE, -1, "Steps between evaluations; -1 = none."),
    unused("eval_data_dir", Text(), "", "Folder of evaluation data."),
    unused("enable_generate_video_for_eval", Boolean(), False, "Make videos in evaluations."),
    unused("eval_max_number_of_samples_in_bucket", Integer(minimum=1), 60, "Samples per bucket."),
    unused("enable_eval_timesteps", Boolean(), False, "Tag timesteps for evaluation."),
    unused(
        "timesteps_list",
        ListOf(Integer(minimum=0)),
        (125, 250, 375, 500, 625, 750, 875),
        "Timesteps of evaluation buckets.",
    ),
    unused("num_eval_samples", Integer(minimum=0), 420, "Samples for evaluation."),
    unused("enable_mllog", Boolean(), False, "Write MLPerf logs."),
    trains(
        "learning_rate_decay",
        Choice(("constant", "cosine")),
        "constant",
        "What the rate does after it has risen.",
    ),
    trains("ema_decay", SHARE, 0.999, "Decay of the running mean of the weights."),
    trains(
        "gradient_accumulation_steps",
        Integer(minimum=1),
        1,
        "Pieces that a batch is worked on in.",
    ),
    trains("caption_dropout", SHARE, 0.1, "Share of captions replaced by the empty one."),
    trains(
        "train_experts",
        Choice(("both", "shared", "high_noise", "low_noise")),
        "both",
        "Train both experts of wan2.2 in turn, one network for all noise levels, or one expert.",
    ),
    trains(
        "train_from_scratch",
        Boolean(),
        False,
        "Start from weights drawn by `seed` instead of those of the model; its sizes are kept.",
    ),
    trains("keep_checkpoints", Integer(minimum=1), 2, "Checkpoints that are kept."),
    trains("sample_every", Integer(minimum=0), 0, "Steps between sample videos; 0 = none."),
    trains("tensorboard_dir", Text(), "", "Folder for TensorBoard; empty = none."),
    trains("export_dir", Text(), "", "Folder that the trained model is written to; empty = none."),
)

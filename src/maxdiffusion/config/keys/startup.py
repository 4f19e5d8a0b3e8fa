"""Keys about config files, the start of the program and its caches."""

from maxdiffusion.config.kinds import Boolean, Integer, Nullable, Text
from maxdiffusion.config.schema import refused, unused, used

FILES = (
    used(
        "base_config",
        Nullable(Text()),
        None,
        "Another YAML file, relative to this one, whose values hold where this one says nothing.",
    ),
    used(
        "print_config",
        Boolean(),
        False,
        "Print the resolved config with the source of each value, and stop.",
    ),
)

KEYS = (
    used(
        "jax_cache_dir",
        Text(),
        "",
        "Folder of jax's persistent compilation cache; empty = none.",
    ),
    used(
        "aot_cache_dir",
        Text(),
        "",
        "Folder of compiled programs that a later run starts from, and that preflight_wan fills; "
        "empty = none.",
    ),
    used(
        "prompt_embeddings_cache_dir",
        Text(),
        "",
        "Folder of prompt embeddings; a run that finds all of its prompts there does without the "
        "text encoder; empty = none.",
    ),
    refused(
        "compile_topology_num_slices",
        Integer(minimum=1, special=(-1,)),
        -1,
        "Number of slices to compile for, without having them; -1 = those that are there.",
        way_out="Leave it at -1",
    ),
    used(
        "jax_coordinator_address",
        Text(),
        "",
        "host:port of the first process of a job with several; empty = found by jax.",
    ),
    used(
        "jax_num_processes",
        Nullable(Integer(minimum=1)),
        None,
        "Number of processes of a job with several; null = found by jax.",
    ),
    used(
        "jax_process_id",
        Nullable(Integer(minimum=0)),
        None,
        "Which process of a job with several this one is; null = found by jax.",
    ),
    used(
        "skip_jax_distributed_system",
        Boolean(),
        False,
        "Run this process alone, even where jax finds others.",
    ),
    used(
        "jax_distributed_initialization_timeout",
        Integer(minimum=1),
        300,
        "Seconds that a process waits for the others at the start of a job.",
    ),
    used(
        "jax_distributed_heartbeat_timeout_seconds",
        Integer(minimum=10),
        100,
        "Seconds without a sign after which jax ends a job; after half of them the dead process "
        "is named and the job ends.",
    ),
    used(
        "hang_timeout_seconds",
        Integer(minimum=1),
        1800,
        "Seconds that a process may stay at one stage (compiling is one) before the job ends.",
    ),
    unused("hardware", Text(), "tpu", "Kind of device; jax finds it by itself."),
    used(
        "libtpu_init_args",
        Text(),
        "auto",
        "Flags of the TPU compiler: auto = those for overlap on this chip, none, or flags; those "
        "in the variable LIBTPU_INIT_ARGS win.",
    ),
    used(
        "enable_profiler",
        Boolean(),
        False,
        "Write a profile of a few denoise or training steps to output_dir/profile/host_N.",
    ),
    used(
        "skip_first_n_steps_for_profiler",
        Integer(minimum=0),
        5,
        "Steps before the profile begins.",
    ),
    used(
        "profiler_steps",
        Integer(minimum=1),
        10,
        "Steps in the profile; it ends with the loop of steps, if not before.",
    ),
    unused(
        "enable_jax_named_scopes",
        Boolean(),
        False,
        "Finer names in a profile; names are always given here.",
    ),
    refused(
        "enable_ml_diagnostics",
        Boolean(),
        False,
        "Report the run to Google Cloud ML diagnostics.",
        way_out="Leave it false",
    ),
    unused("profiler_gcs_path", Text(), "", "Where ML diagnostics keeps profiles."),
    unused("enable_ondemand_xprof", Boolean(), False, "Let ML diagnostics ask for profiles."),
)

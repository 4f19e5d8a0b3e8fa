"""The commands of the package: help texts, common config fields, and the call that does the work.

The modules `maxdiffusion.generate_wan` and so on are the public names of these commands.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from maxdiffusion.cli.entry import Command, Work, with_config
from maxdiffusion.config import ParsedConfig
from maxdiffusion.errors import Problem, ProblemsFound

CONFIG_ARGUMENTS = "CONFIG [key=value ...]"
CONFIG_DETAILS = """\
  CONFIG                          a YAML file, such as configs/{example}, or a Python
                                  file whose get_config() returns an ml_collections.ConfigDict
  key=value                       overrides a key of the file: seed=7
  flash_block_sizes.block_q=4096  overrides one entry of a table
  print_config=true               prints the resolved config with the source of each value
  -h, --help                      prints this text
  --version                       prints the version"""
ALL_KEYS = "docs/configuration.md lists all keys."
SAMPLING = ("prompt", "seed", "height", "width", "num_frames", "num_inference_steps")
DEVICES = ("attention", "ici_data_parallelism", "ici_context_parallelism", "ulysses_shards")
TRAINING = (
    "pretrained_model_name_or_path",
    "dataset_type",
    "train_data_dir",
    "latent_cache_dir",
    "checkpoint_dir",
    "export_dir",
    "max_train_steps",
    "global_batch_size",
    "learning_rate",
)


def generate(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Makes the videos of a config, on all processes of the job."""
    from maxdiffusion.cli.distributed_run import run_distributed
    from maxdiffusion.generation.generate import generate

    search_tiles = None
    if parsed.config.enable_tile_search:
        from maxdiffusion.preflight.tile_search import search_before_run

        search_tiles = search_before_run
    run_distributed(parsed, partial(generate, search_tiles=search_tiles))


def calibrate(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Measures the ratios of MagCache for a config, on all processes of the job."""
    from maxdiffusion.cli.distributed_run import run_distributed
    from maxdiffusion.generation.calibrate import calibrate

    run_distributed(parsed, calibrate)


def compare_quality(arguments: Sequence[str]) -> None:
    """Compares lossy modes of a config with its exact form, on all processes of the job."""
    from maxdiffusion.quality.modes import split_arguments

    rest, names = split_arguments(arguments)

    def work(parsed: ParsedConfig, stated: Sequence[str]) -> None:
        from maxdiffusion.cli.distributed_run import run_distributed
        from maxdiffusion.quality.compare import compare

        run_distributed(parsed, partial(compare, arguments=stated, names=names))

    with_config(work)(rest)


def serve(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Serves videos over HTTP, on all processes of the job."""
    require_serving()
    from maxdiffusion.cli.distributed_run import run_distributed
    from maxdiffusion.serving.server import serve

    run_distributed(parsed, serve)


def require_serving() -> None:
    """Raises unless the packages of the extra `serve` are installed."""
    from importlib.util import find_spec

    names = ("starlette", "uvicorn", "python_multipart", "prometheus_client", "sqlalchemy", "PIL")
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        rule, remedy = "is needed by the server", 'pip install "maxdiffusion[serve]"'
        raise ProblemsFound(
            [Problem(name="package", value=name, rule=rule, remedy=remedy) for name in missing]
        )


def train(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Trains the transformers of a config, on all processes of the job."""
    from maxdiffusion.cli.distributed_run import run_distributed
    from maxdiffusion.training.train import train

    run_distributed(parsed, train)


def preprocess(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Encodes the training clips of a config, on all processes of the job."""
    from maxdiffusion.cli.distributed_run import run_distributed
    from maxdiffusion.training.train import preprocess

    run_distributed(parsed, preprocess)


def train_vae(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Trains the autoencoder of a config."""
    from maxdiffusion.training.train import train_vae

    train_vae(parsed)


def preflight(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Reports on one job, ranks attentions, or estimates the cost for several context sizes."""
    use_topology(parsed)
    from maxdiffusion.preflight.command import preflight
    from maxdiffusion.preflight.ranking import compare, scan

    if parsed.config.compare:
        compare(parsed, arguments)
    if parsed.config.scan_cp:
        scan(parsed)
    if not (parsed.config.compare or parsed.config.scan_cp):
        preflight(parsed, arguments)


def preflight_training(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Reports on the training step of a config."""
    use_topology(parsed)
    from maxdiffusion.preflight.training import preflight_training

    preflight_training(parsed, arguments)


def tune(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Searches the best block sizes of a config's attention."""
    if not parsed.config.topology:
        from maxdiffusion.preflight.tile_search import tune_here

        tune_here(parsed)
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tune_") as dump:
        use_topology(parsed, dump=dump)
        from maxdiffusion.preflight.tile_search import tune_for_topology

        tune_for_topology(parsed, Path(dump))


def use_topology(parsed: ParsedConfig, *, dump: str | None = None) -> None:
    """Sets the environment of libtpu for the config's topology; call it before jax is imported.

    libtpu writes the machine code that it generates to `dump`.
    """
    from maxdiffusion.costs.chips import read_topology
    from maxdiffusion.preflight.devices import check_libtpu, prepare_environment

    try:
        topology = read_topology(parsed.config.topology)
    except ProblemsFound as error:
        raise ProblemsFound([*parsed.problems, *error.problems]) from None
    check_libtpu()
    prepare_environment(topology, dump=dump)


def read_profile(arguments: Sequence[str]) -> None:
    """Prints the seconds of every scope of a profile."""
    from maxdiffusion.runtime.traces import DEPTH, read_profiles, table

    folder, *depth = arguments
    if depth and not depth[0].isdecimal():
        rule = "must be a positive integer"
        raise ProblemsFound([Problem(name="DEPTH", value=depth[0], rule=rule)])
    print(table(read_profiles(Path(folder)), int(depth[0]) if depth else DEPTH))


def plan_fleet(arguments: Sequence[str]) -> None:
    """Prints the servers that a load needs."""
    from maxdiffusion.costs.fleet import describe, draw_plan, parse_arguments, plan

    request = parse_arguments(arguments)
    print(describe(request, plan(request)))
    if request.plot:
        draw_plan(request, Path(request.plot))


def config_command(
    *,
    name: str,
    summary: str,
    example: str,
    run: Work,
    common: tuple[str, ...],
    arguments: str = CONFIG_ARGUMENTS,
    options: str = "",
    note: str = "",
) -> Command:
    """Returns a command that takes a config and overrides; `options` are its own among these."""
    details = [CONFIG_DETAILS.format(example=example), options, f"{note} {ALL_KEYS}".strip()]
    return Command(
        name=name,
        summary=summary,
        arguments=arguments,
        details="\n\n".join(filter(None, details)),
        run=with_config(run),
        common=common,
    )


GENERATE = config_command(
    name="generate_wan",
    summary="Makes videos.",
    example="wan_tiny.yml",
    run=generate,
    common=("pretrained_model_name_or_path", *SAMPLING, "output_dir", *DEVICES),
)
ANIMATE = config_command(
    name="generate_wan_animate",
    summary="Makes a character move as in a video, or replaces a person by it (WAN 2.2 Animate).",
    example="base_wan_animate.yml",
    note="generate_wan does the same with this config.",
    run=generate,
    common=(
        *("pretrained_model_name_or_path", "prompt", "seed", "height", "width"),
        *("mode", "reference_image_path", "pose_video_path", "face_video_path"),
        *("background_video_path", "mask_video_path", "segment_frame_length"),
        *("prev_segment_conditioning_frames", "animate_guidance_scale"),
        *("num_inference_steps", "output_dir", *DEVICES),
    ),
)
SERVE = config_command(
    name="serve_wan",
    summary="Serves videos over HTTP: the videos API of the openai package, and a page.",
    example="wan_tiny.yml",
    note="docs/serving.md explains the server.",
    run=serve,
    common=(
        *("serve_host", "serve_port", "serve_dir", "serve_sizes", "serve_other_sizes"),
        *("serve_keys_file", "output_dir", "aot_cache_dir"),
    ),
)
TRAIN = config_command(
    name="train_wan",
    summary="Trains a WAN model. The same command continues an interrupted run.",
    example="train_embedded.yml",
    note="docs/training.md explains training.",
    run=train,
    common=TRAINING,
)
TRAIN_VAE = config_command(
    name="train_wan_vae",
    summary="Trains the autoencoder of a WAN model. The same command continues an interrupted run.",
    example="train_embedded.yml",
    note="docs/training.md explains training.",
    run=train_vae,
    common=TRAINING,
)
PREPROCESS = config_command(
    name="preprocess_wan",
    summary="Encodes training clips: writes latents and text embeddings to latent_cache_dir, where "
    "train_wan\nfinds them. The same command continues an interrupted run.",
    example="train_embedded.yml",
    note="docs/training.md explains training.",
    run=preprocess,
    common=(*TRAINING[:4], "num_frames", "height", "width"),
)
PREFLIGHT = config_command(
    name="preflight_wan",
    summary="Reports how a job will run on a TPU slice: memory, collectives, predicted time. "
    "Needs no TPU.",
    arguments="CONFIG topology=NAME [key=value ...]",
    example="base_wan_27b.yml",
    options="""\
  topology=tpu7x:2x2x1            the TPU slice to compile for
  report=preflight.json           writes the report as JSON too
  compare='["ulysses_custom", "ulysses_ring_custom:2x2"]'
                                  ranks attentions and splits of the context
  aot_cache_dir=programs          stores the programs for generate_wan with the same key
  scan_cp=4,8,16,32               estimates the cost for context sizes; compiles nothing""",
    note="docs/preflight.md explains the report.",
    run=preflight,
    common=("topology", "report", "compare", "scan_cp", "aot_cache_dir", *SAMPLING[2:], *DEVICES),
)
PREFLIGHT_TRAINING = config_command(
    name="preflight_train_wan",
    summary="Reports how a training will run on a TPU slice: memory, collectives, predicted time. "
    "Needs no TPU.",
    arguments="CONFIG topology=NAME [key=value ...]",
    example="base_wan_27b.yml",
    options="""\
  topology=tpu7x:4x4x4            the TPU slice to compile for
  report=training.json            writes the report as JSON too""",
    note="docs/training.md has examples.",
    run=preflight_training,
    common=(
        *("topology", "report", "global_batch_size", "remat_policy", "train_lora"),
        *("ici_fsdp_parallelism", *SAMPLING[2:5], *DEVICES),
    ),
)
TUNE = config_command(
    name="tune_attention",
    summary="Finds the best block sizes of a job's attention kernels.",
    arguments="CONFIG [topology=NAME] [key=value ...]",
    example="base_wan_27b.yml",
    options="""\
  topology=tpu7x:2x2x1            ranks block sizes by their machine code; without it they are
                                  timed on this machine's devices
  tile_search_out=FOLDER          a table of all candidates, where a later run resumes, and plots
  tuned_blocks_file=FILE          stores the best block sizes; jobs with the same key use them""",
    run=tune,
    common=(
        *("topology", "tile_search_out", "tuned_blocks_file"),
        *("tile_search_mode", "tile_search_iters"),
        *SAMPLING[2:5],
        *DEVICES,
    ),
)
CALIBRATE = config_command(
    name="calibrate_cache",
    summary="Measures the ratios that MagCache skips steps by, over the prompts of a job.\n"
    "Writes them to output_dir/mag_ratios.yml.",
    example="base_wan_27b.yml",
    note="docs/sampling.md explains step caches.",
    run=calibrate,
    common=(*SAMPLING, "prompts_file", "flow_shift", "output_dir", *DEVICES),
)
COMPARE_QUALITY = Command(
    name="compare_quality",
    summary="Measures distances of lossy modes from the exact result, and of rounding.\n"
    "Writes output_dir/quality.json and a contact sheet, output_dir/quality.png.",
    arguments="CONFIG [--modes NAME ...] [key=value ...]",
    details=f"{CONFIG_DETAILS.format(example='wan_tiny.yml')}\n"
    """
  --modes magcache,sen_cache      the modes to compare; without it, all that the config allows
    exact, other rounding         other_dtype, data_axis, tensor_axis, ulysses, ring,
                                  ulysses_ring, fixed_m
    lossy                         fp8_attention, int8, fp8, fp8_full, magcache, cfg_cache,
                                  sen_cache, taylor_cache, guidance_cutoff, half_steps,
                                  four_steps

"""
    f"docs/quality.md explains the figures. {ALL_KEYS}",
    run=compare_quality,
    common=(*SAMPLING, "prompts_file", "output_dir", "lpips_weights", "vbench_weights", *DEVICES),
)
READ_PROFILE = Command(
    name="read_profile",
    summary="Prints where the time of profiled steps went.",
    arguments="FOLDER [DEPTH]",
    details="""\
  FOLDER      OUTPUT_DIR/profile of a run with enable_profiler=true
  DEPTH       parts of a scope to tell apart (3: blocks/self_attention/kernel)
  -h, --help  prints this text
  --version   prints the version

docs/profiling.md explains the scopes.""",
    run=read_profile,
)
PLAN_FLEET = Command(
    name="plan_fleet",
    summary="Says how many servers a load of videos needs, by simulating their queue.",
    arguments="rate=PER_HOUR mix=NAME:SECONDS[:SHARE] ...",
    details="""\
  rate=120                        videos per hour that are asked for
  mix=720p:95:0.7                 seconds that a server needs for one video of a size, and its share
  mix=480p:report.json:0.3        the same from a report of preflight_wan
  wait=60                         seconds that 95 of 100 videos may wait at most
  chips=8                         chips of a server; reports have them
  replicas=4                      only this number of servers, instead of the least that suffice
  plot=fleet.svg                  draws waits over the number of servers
  -h, --help                      prints this text
  --version                       prints the version

docs/serving.md has an example.""",
    run=plan_fleet,
)
COMMANDS = (
    *(GENERATE, ANIMATE, SERVE, TRAIN, TRAIN_VAE, PREPROCESS, PREFLIGHT, TUNE, READ_PROFILE),
    PREFLIGHT_TRAINING,
    CALIBRATE,
    COMPARE_QUALITY,
    PLAN_FLEET,
)

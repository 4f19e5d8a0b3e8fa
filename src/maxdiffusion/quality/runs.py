"""Runs the exact form of a config and its modes on the same prompts and seeds, and compares clips.

    resolve every mode       refusals come before any weight is read
    exact run                -> reference clips
    modes, weights by weights -> clips -> distances from the reference, forwards, scores

Modes that need the same weights on the same mesh share them; they are freed before others are read.
Modes with the same programs share those, too.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8

from maxdiffusion.attention import AttentionOptions
from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config.load import ParsedConfig, read_config
from maxdiffusion.diffusion.caches.sen_cache import SenCache
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.generate import find_prompts, load, request_of
from maxdiffusion.generation.job import ResolvedJob, resolve_job
from maxdiffusion.generation.resume import batches, list_videos
from maxdiffusion.pipelines import pipeline_named
from maxdiffusion.pipelines.programs import as_bytes
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.settings import Decoding
from maxdiffusion.pipelines.text import PromptTokenizer
from maxdiffusion.pipelines.wan import VideoPipeline
from maxdiffusion.quality.metrics import WINDOW, Distance, distance
from maxdiffusion.quality.modes import MODES, Kind, Mode, find_modes, modes_of
from maxdiffusion.runtime.progress import steps_bar
from maxdiffusion.runtime.timing import Timings

logger = logging.getLogger(__name__)

Clip = UInt8[np.ndarray, "F Y X 3"]


@dataclass(frozen=True, kw_only=True)
class ModeJob:
    """A mode that can run: its job, and the folder of its weights."""

    mode: Mode | None  # None for the exact run
    overrides: tuple[str, ...]
    job: ResolvedJob
    folder: ModelFolder

    @property
    def name(self) -> str:
        """Name of the mode."""
        return "exact" if self.mode is None else self.mode.name

    @property
    def weights_key(self) -> tuple[Any, ...]:
        """Everything that the weights on the devices depend on."""
        builder, config = self.job.builder, self.job.config
        patches = [*(weights.patch_notes for weights in self.folder.weights.values())]
        files = (config.enable_lora, repr(config.lora_config), repr(patches))
        # Attention and decoding are programs over the same weights.
        settings = replace(
            builder.settings,
            attention="",
            attention_options=AttentionOptions(),
            decoding=Decoding(),
        )
        return (repr(builder.spec), repr(settings), builder.mesh, *files)

    @property
    def program_key(self) -> tuple[Any, ...]:
        """Everything that the compiled programs of a pipeline depend on."""
        return (*self.weights_key, repr(self.job.builder.settings))


@dataclass(frozen=True, kw_only=True)
class Made:
    """The clips of one mode; `forwards` of `most` rows of a batch went through the blocks."""

    clips: tuple[Clip, ...]
    seconds: float
    forwards: float
    most: int


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row of the ledger."""

    run: ModeJob
    made: Made
    distances: tuple[Distance, ...]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A mode that does not go with this config, model and machine."""

    mode: Mode
    problems: tuple[Problem, ...]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Everything that was run, and the modes that were not."""

    exact: ModeJob
    reference: Made
    rows: tuple[Compared, ...]
    refused: tuple[Refused, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt of each clip."""
        return tuple(video.prompt for video in list_videos(self.exact.job))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each clip."""
        return tuple(video.seed for video in list_videos(self.exact.job))

    def rows_of(self, kind: Kind) -> tuple[Compared, ...]:
        """Returns the rows of one kind of modes."""
        return tuple(row for row in self.rows if row.run.mode and row.run.mode.kind is kind)


def resolve_modes(
    parsed: ParsedConfig, arguments: Sequence[str], names: Sequence[str]
) -> tuple[ModeJob, list[ModeJob], list[Refused]]:
    """Returns the exact run, the modes that can run and those that cannot, before weights are read.

    `names` empty stands for all modes. Raises the problems of the exact run, and those of modes
    that are named.
    """
    wanted = find_modes(names) if names else MODES
    job, folder = resolve_job(parsed)
    exact = ModeJob(mode=None, overrides=(), job=job, folder=folder)
    check_exact(exact, arguments)
    found: list[ModeJob] = []
    refused: list[Refused] = []
    for mode in wanted:
        overrides = mode.arguments(parsed.config)
        try:
            found.append(mode_job(mode, exact, arguments, overrides))
        except ProblemsFound as error:
            refused.append(Refused(mode=mode, problems=tuple(error.problems)))
    if names and refused:
        raise ProblemsFound(
            [of_mode(one.mode, problem) for one in refused for problem in one.problems]
        )
    return exact, found, refused


def mode_job(
    mode: Mode, exact: ModeJob, arguments: Sequence[str], overrides: tuple[str, ...]
) -> ModeJob:
    """Returns the resolved job of a mode; raises what does not go together."""
    parsed = read_config([*arguments, *overrides])
    if parsed.config.to_json() == exact.job.config.to_json():
        rule = f"the exact run has {' '.join(overrides)} already"
        raise ProblemsFound([Problem(name=mode.name, value="", rule=rule)])
    job, folder = resolve_job(parsed)
    return ModeJob(mode=mode, overrides=overrides, job=job, folder=folder)


def check_exact(exact: ModeJob, arguments: Sequence[str]) -> None:
    """Raises if the exact run is lossy itself, or makes clips that cannot be compared."""
    config, problems = exact.job.config, Collector()
    for mode in modes_of(Kind.LOSSY):
        overrides = mode.arguments(config)
        if read_config([*arguments, *overrides]).config.to_json() == config.to_json():
            rule = f"the exact run is lossy itself (mode {mode.name})"
            remedy = "Leave it out of the config: the mode sets it"
            problem = Problem(name=" ".join(overrides), value="", rule=rule, remedy=remedy)
            problems.problems.append(problem)
    if exact.job.shape.task.in_segments:
        rule = "clips of several segments are not compared"
        problems.problems.append(Problem(name="compare_quality", value="Animate", rule=rule))
    for name, side in (("height", config.height), ("width", config.width)):
        if side < WINDOW:
            rule = f"SSIM needs at least {WINDOW} pixels"
            problems.problems.append(Problem(name=name, value=side, rule=rule))
    problems.raise_if_any()


def of_mode(mode: Mode, problem: Problem) -> Problem:
    """Returns the problem with the name of its mode."""
    return Problem(
        name=f"mode {mode.name}: {problem.name}",
        value=problem.value,
        rule=problem.rule,
        remedy=problem.remedy,
    )


class Loaded:
    """The pipelines of one set of weights; other weights replace them."""

    def __init__(self) -> None:
        self._weights_key: tuple[Any, ...] | None = None
        self._pipelines: dict[tuple[Any, ...], VideoPipeline] = {}

    def pipeline(self, run: ModeJob) -> VideoPipeline:
        """Returns the pipeline of a run, with weights and programs that are there already."""
        if run.weights_key != self._weights_key:
            self._pipelines.clear()  # the last references: old weights are freed first
            logger.info("%s: reading weights", run.name)
            videos = list_videos(run.job)
            self._weights_key = run.weights_key
            self._pipelines[run.program_key] = load(run.job, run.folder, videos, Timings())
        if run.program_key not in self._pipelines:
            self._pipelines[run.program_key] = self._with_weights_of(run)
        return self._pipelines[run.program_key]

    def _with_weights_of(self, run: ModeJob) -> VideoPipeline:
        held, job = next(iter(self._pipelines.values())), run.job
        tokenizer = PromptTokenizer.load(run.folder.root / "tokenizer")
        prompts = [video.prompt for video in list_videos(job)]
        return pipeline_named(job.shape.task.pipeline)(
            builder=job.builder,
            parameters=held.parameters,
            tokenizer=tokenizer,
            prompt_cache=find_prompts(job, run.folder, tokenizer, prompts),
            attention=job.plans,
            folder=run.folder,
        )


def make(run: ModeJob, pipeline: VideoPipeline) -> Made:
    """Makes the clips of a run; compilation is not timed."""
    groups = [*batches(list_videos(run.job), run.job.shape.videos)]
    requests = [request_of(run.job, group) for group in groups]
    clips: list[np.ndarray] = []
    seconds, forwards, most = 0.0, 0.0, 0
    with steps_bar(run.name, sum(map(len, groups)), unit="clip") as advance:
        for group, request in zip(groups, requests, strict=True):
            pipeline.compile(request, as_bytes)
            started = time.perf_counter()
            latents, used = denoised(pipeline, request)
            for _, one in zip(group, latents, strict=False):  # rows that fill a group up are left
                clips.append(np.asarray(pipeline.decode(request, one, as_bytes)))
                advance()
            seconds += time.perf_counter() - started
            forwards, most = (
                forwards + used,
                most + len(request.plan) * request.plan.guidance.copies,
            )
    return Made(
        clips=tuple(clips),
        seconds=seconds / len(clips),
        forwards=forwards / len(groups),
        most=most // len(groups),
    )


def denoised(pipeline: VideoPipeline, request: Request) -> tuple[np.ndarray, float]:
    """Returns the latents of a request, and the rows per video that went through the blocks."""
    forwards = float(sum(step.computed_rows for step in request.plan))
    for state, _ in pipeline.states(request, pipeline.condition(request)):
        last = state
    if isinstance(request.step_cache, SenCache):  # decided on the devices
        forwards = float(last.cache.computed) * request.plan.guidance.copies
    return np.asarray(last.sample), forwards


def run_all(exact: ModeJob, runs: Sequence[ModeJob], refused: Sequence[Refused]) -> Ledger:
    """Makes all clips, the exact ones first, and then modes by the weights that they need."""
    for one in refused:
        for problem in one.problems:
            logger.info("not run: %s", of_mode(one.mode, problem))
    loaded = Loaded()
    reference = make(exact, loaded.pipeline(exact))
    groups: dict[tuple[Any, ...], list[ModeJob]] = {exact.weights_key: []}
    for run in runs:
        groups.setdefault(run.weights_key, []).append(run)
    rows: dict[str, Compared] = {}
    for run in (run for group in groups.values() for run in group):
        made = make(run, loaded.pipeline(run))
        pairs = zip(made.clips, reference.clips, strict=True)
        distances = tuple(distance(one, two) for one, two in pairs)
        rows[run.name] = Compared(run=run, made=made, distances=distances)
    return Ledger(
        exact=exact,
        reference=reference,
        rows=tuple(rows[run.name] for run in runs),
        refused=tuple(refused),
    )

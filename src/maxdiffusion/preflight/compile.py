"""Compiles every program of a generation for a topology, and explains what the compiler refuses."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax

from maxdiffusion.attention import BlockAttention
from maxdiffusion.costs.chips import GIB, Chip
from maxdiffusion.diffusion import Sampler
from maxdiffusion.diffusion.denoise import StepCache
from maxdiffusion.diffusion.guidance import Action, PlannedStep, RunPlan
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import MIB
from maxdiffusion.pipelines.programs import ProgramBuilder, ProgramShape, as_bytes, as_floats
from maxdiffusion.pipelines.text import BUCKETS, TextPrograms

logger = logging.getLogger(__name__)

DENOISE_STEP, ENCODE, ENCODE_IMAGE = "denoise_step", "encode", "encode_image"
PROMPT_ONLY_STEP = "denoise_step of the prompt only"
SKIPPED_STEP = "denoise_step without blocks"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """HBM of one program on one device, in bytes."""

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Returns all bytes at once; results that reuse the buffer of an argument count once."""
        return self.arguments + self.without_arguments

    @property
    def without_arguments(self) -> int:
        """Returns the bytes that the program needs on top of its arguments."""
        return self.outputs + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A compiled program: its schedule as text, its memory, and its compile time in seconds."""

    name: str
    text: str
    memory: Memory
    flops: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProgramMaker:
    """A program that can be compiled, under the name that profiles show."""

    name: str
    compile: Callable[[], jax.stages.Compiled]


def programs_of(
    builder: ProgramBuilder,
    shape: ProgramShape,
    *,
    sampler: Sampler,
    attention: BlockAttention,
    cache: StepCache | None = None,
) -> tuple[ProgramMaker, ...]:
    """Returns the programs of a generation, the denoise step first; both experts share it.

    The text encoder is that of the longest prompts; shorter ones need less.
    """
    # The next segment of a video continues frames that were not rounded.
    frame_format = as_floats if shape.task.in_segments else as_bytes
    lowerings: dict[str, Callable[[], jax.stages.Lowered]] = {
        DENOISE_STEP: lambda: builder.lower_denoise_step(shape, sampler, attention, cache=cache),
        "read_text": lambda: builder.lower_read_text(shape),
        "start": lambda: builder.lower_start(shape, sampler, attention, cache=cache),
        "decode": lambda: builder.lower_decode(shape, frame_format),
    }
    makers = [
        ProgramMaker(name=name, compile=partial(_compiled, builder, name, lower))
        for name, lower in lowerings.items()
    ]
    text_encoder = text_encoder_of(builder, shape.text_length, shape.text_length)
    return (*makers, text_encoder, *encoders_of(builder, shape))


def encoders_of(builder: ProgramBuilder, shape: ProgramShape) -> tuple[ProgramMaker, ...]:
    """Returns the encoders of the task's images and videos; none for text alone."""
    task = shape.task
    makers = [
        ProgramMaker(
            name=encode_name(frames),
            compile=partial(
                _compiled, builder, ENCODE, partial(builder.lower_encode, shape, frames)
            ),
        )
        for frames in dict.fromkeys(task.encoded_frames(shape.latent, builder.spec.vae))
    ]
    if task.images:
        lower = partial(builder.lower_encode_image, task.images)
        compiled = partial(_compiled, builder, ENCODE_IMAGE, lower)
        makers.append(ProgramMaker(name=ENCODE_IMAGE, compile=compiled))
    return tuple(makers)


def encode_name(frames: int) -> str:
    """Returns the name of the VAE encoder of this many frames in reports."""
    return f"{ENCODE} of {frames} frame{'' if frames == 1 else 's'}"


def step_name(step: PlannedStep, shape: ProgramShape) -> str:
    """Returns the name of a step's program, in a run whose widest steps have this shape."""
    if step.action is Action.SKIP:
        return SKIPPED_STEP
    return DENOISE_STEP if step.guidance == shape.guidance else PROMPT_ONLY_STEP


def other_steps_of(
    builder: ProgramBuilder,
    shape: ProgramShape,
    *,
    sampler: Sampler,
    plan: RunPlan,
    cache: StepCache | None,
) -> tuple[ProgramMaker, ...]:
    """Returns the programs of steps that compute less, and the texts that they need."""
    lowerings: dict[str, tuple[str, Callable[[], jax.stages.Lowered]]] = {}
    for step in plan:
        name, single = step_name(step, shape), shape.with_guidance(step.guidance)
        if name == DENOISE_STEP:
            continue
        folded = builder.folded_for(single)
        lowerings[name] = (
            DENOISE_STEP,
            partial(
                folded.lower_denoise_step,
                single,
                sampler,
                folded.attention(single),
                cache=cache,
                action=step.action,
            ),
        )
        if single != shape:
            lowerings["read_text of the prompt only"] = (
                "read_text",
                partial(folded.lower_read_text, single),
            )
    return tuple(
        ProgramMaker(name=name, compile=partial(_compiled, builder, stored, lower))
        for name, (stored, lower) in lowerings.items()
    )


def shorter_text_encoders(builder: ProgramBuilder) -> tuple[ProgramMaker, ...]:
    """Returns the encoders of shorter prompts, which a job may need too."""
    longest = builder.settings.text_length
    shorter = [length for length in BUCKETS if length < longest]
    return tuple(text_encoder_of(builder, length, longest) for length in shorter)


def text_encoder_of(builder: ProgramBuilder, length: int, longest: int) -> ProgramMaker:
    """Returns the text encoder of prompts of up to `length` tokens, padded to the longest."""

    def text_encoder() -> jax.stages.Compiled:
        models, mesh = builder.models, builder.mesh
        programs = TextPrograms(models.text_encoder.graph, mesh, builder.compile)
        weights = models.text_encoder.on(mesh)
        with jax.default_matmul_precision(builder.settings.precision.matmul):
            compiled = programs.get(weights, length, longest)
        assert isinstance(compiled, jax.stages.Compiled)
        return compiled

    name = "text_encoder" if length == longest else f"text_encoder of {length} tokens"
    return ProgramMaker(name=name, compile=text_encoder)


def _compiled(
    builder: ProgramBuilder, name: str, lower: Callable[[], jax.stages.Lowered]
) -> jax.stages.Compiled:
    return builder.compile(name, lower())


def compile_program(maker: ProgramMaker, chip: Chip) -> CompiledProgram:
    """Returns the compiled program; a refusal of the compiler raises ProblemsFound."""
    started = time.perf_counter()
    try:
        compiled = maker.compile()
    except Exception as error:
        if not is_refusal(error):
            raise
        raise ProblemsFound([explain(maker.name, str(error), chip)]) from error
    stats = compiled.memory_analysis()
    assert stats is not None, maker.name  # every TPU program has them
    costs = compiled.cost_analysis() or {}
    return CompiledProgram(
        name=maker.name,
        text=compiled.as_text() or "",
        memory=Memory(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
        ),
        flops=float(costs.get("flops", 0.0)),
        seconds=time.perf_counter() - started,
    )


def compile_all(makers: tuple[ProgramMaker, ...], chip: Chip) -> Iterator[CompiledProgram]:
    """Yields the compiled programs, with a message before and after each."""
    for number, maker in enumerate(makers, 1):
        count = f"[{number}/{len(makers)}]"
        logger.info(f"{count} compiling {maker.name} ...")
        program = compile_program(maker, chip)
        peak = program.memory.peak / GIB
        logger.info(f"{count} {maker.name}: {program.seconds:.1f} s, {peak:.2f} GiB HBM")
        yield program


_REMEDIES = {
    "hbm": "Use more devices, split the weights with ici_fsdp_parallelism or "
    "ici_tensor_parallelism, raise ici_context_parallelism, lower per_device_batch_size, height, "
    "width or num_frames",
    "vmem": "Lower flash_block_sizes.block_q or flash_block_sizes.block_kv, or raise "
    "flash_block_sizes.vmem_limit_bytes if the chip has more",
    "decode": "Use vae_decode_chunk=1, vae_tiling=true or more vae_spatial devices",
    "layout": "Use multiples of 128 for flash_block_sizes.block_q and flash_block_sizes.block_kv, "
    "or leave flash_block_sizes out; or another attention or activations_dtype",
}


def is_refusal(error: Exception) -> bool:
    """Returns whether an error is the compiler's, rather than a bug of this program.

    The compiler of Pallas kernels raises its own classes, which jax.errors does not export.
    """
    if isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError):
        return True
    return type(error).__module__.startswith("jax.") and not isinstance(error, TypeError)


def explain(program: str, message: str, chip: Chip) -> Problem:
    """Returns the problem behind a compiler's message, with the config fields to change."""
    used = _sizes(message)
    if re.search(r"vmem", message, re.IGNORECASE) and _exhausted(message):
        return Problem(
            name=program,
            value="compile error",
            rule=f"a kernel needs more VMEM than it may use ({used or _first_line(message)}; "
            f"{chip.title} has {chip.vmem_bytes / MIB:.0f} MiB)",
            remedy=_REMEDIES["vmem"],
        )
    if re.search(r"hbm", message, re.IGNORECASE) and _exhausted(message):
        remedy = _REMEDIES["decode"] if program == "decode" else _REMEDIES["hbm"]
        return Problem(
            name=program,
            value="compile error",
            rule=f"it does not fit into the device's HBM ({used or _first_line(message)}; "
            f"{chip.title} has {chip.hbm_bytes / GIB:.0f} GiB a device)",
            remedy=remedy,
        )
    if re.search(r"mosaic|layout|pallas", message, re.IGNORECASE):
        return Problem(
            name=program,
            value="compile error",
            rule=f"a kernel has no form on {chip.title} at these sizes: {_first_line(message)}",
            remedy=_REMEDIES["layout"],
        )
    return Problem(
        name=program,
        value="compile error",
        rule=f"the TPU compiler refuses it: {_first_line(message)}",
        remedy="Try another attention, other flash_block_sizes or another mesh",
    )


def _exhausted(message: str) -> bool:
    return bool(re.search(r"RESOURCE_EXHAUSTED|out of memory|exceed", message, re.IGNORECASE))


def _sizes(message: str) -> str:
    """Returns the part of the message with the sizes, or an empty string."""
    for pattern in (
        r"Used [\d.]+\w* of [\d.]+\w* \w+",
        r"[Ss]coped allocation with size [\d.]+\w* and limit [\d.]+\w*",
        r"\([\d.]+\w\) exceeds available HBM \([\d.]+\w\)",
        r"size [\d.]+\w* .{0,40}limit [\d.]+\w*",
    ):
        found = re.search(pattern, message)
        if found:
            return found[0]
    return ""


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else "no reason given"

"""Every program that a generation runs, compiled for a topology, and what each one needs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax

from maxdiffusion.pipelines.programs import ProgramShape, Workshop, as_bytes
from maxdiffusion.pipelines.prompts import BUCKETS, TextPrograms
from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.compile_errors import explain, is_refusal
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.schedulers import Sampler

DENOISE_STEP = "denoise_step"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """HBM of one program on one device, in bytes."""

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Everything at once; results that take the place of arguments count once."""
        return self.arguments + self.beside_arguments

    @property
    def beside_arguments(self) -> int:
        """What the program needs beside its arguments."""
        return self.outputs + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A compiled program: its schedule as text, its memory, and the seconds it took to compile."""

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
    workshop: Workshop, shape: ProgramShape, sampler: Sampler
) -> tuple[ProgramMaker, ...]:
    """What a generation runs, the denoise step first; both experts run the same one.

    The text encoder is compiled for the longest prompts; shorter ones take less.
    """
    lowerings: dict[str, Callable[[], jax.stages.Lowered]] = {
        DENOISE_STEP: lambda: workshop.lower_denoise_step(shape, sampler),
        "read_text": lambda: workshop.lower_read_text(shape),
        "start": lambda: workshop.lower_start(shape, sampler),
        "decode": lambda: workshop.lower_decode(shape, as_bytes),
    }
    makers = [
        ProgramMaker(name=name, compile=partial(_compiled, workshop, name, lower))
        for name, lower in lowerings.items()
    ]
    return (*makers, text_encoder_of(workshop, shape.text_length, shape.text_length))


def shorter_text_encoders(workshop: Workshop) -> tuple[ProgramMaker, ...]:
    """The encoders of shorter prompts, which a job may need beside that of the longest."""
    longest = workshop.settings.text_length
    shorter = [length for length in BUCKETS if length < longest]
    return tuple(text_encoder_of(workshop, length, longest) for length in shorter)


def text_encoder_of(workshop: Workshop, length: int, longest: int) -> ProgramMaker:
    """The text encoder of prompts of up to `length` tokens, filled up to the longest."""

    def text_encoder() -> jax.stages.Compiled:
        models, mesh = workshop.models, workshop.mesh
        programs = TextPrograms(models.text_encoder.graph, mesh, workshop.compile)
        weights = models.text_encoder.on(mesh)
        with jax.default_matmul_precision(workshop.settings.precision.matmul):
            compiled = programs.get(weights, length, longest)
        assert isinstance(compiled, jax.stages.Compiled)
        return compiled

    name = "text_encoder" if length == longest else f"text_encoder of {length} tokens"
    return ProgramMaker(name=name, compile=text_encoder)


def _compiled(
    workshop: Workshop, name: str, lower: Callable[[], jax.stages.Lowered]
) -> jax.stages.Compiled:
    return workshop.compile(name, lower())


def compile_program(maker: ProgramMaker, chip: Chip) -> CompiledProgram:
    """The compiled program; a compiler's refusal becomes ProblemsFound that names config keys."""
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


def compile_all(
    makers: tuple[ProgramMaker, ...], chip: Chip, say: Callable[[str], None]
) -> Iterator[CompiledProgram]:
    """The compiled programs one by one, with a line before and after each."""
    for number, maker in enumerate(makers, 1):
        say(f"[{number}/{len(makers)}] compiling {maker.name} ...")
        program = compile_program(maker, chip)
        gib = program.memory.peak / 2**30
        say(f"[{number}/{len(makers)}] {maker.name}: {program.seconds:.1f} s, {gib:.2f} GiB HBM")
        yield program

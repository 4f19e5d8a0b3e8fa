"""Every program that a generation runs, compiled for a topology, and what each one needs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from maxdiffusion.pipelines.programs import ProgramShape, Workshop, as_bytes
from maxdiffusion.pipelines.prompts import TextPrograms
from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.compile_errors import explain
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

    def text_encoder() -> jax.stages.Compiled:
        models, mesh = workshop.models, workshop.mesh
        programs = TextPrograms(models.text_encoder.graph, mesh)
        weights = models.text_encoder.on(mesh)
        compiled = programs.get(weights, shape.text_length, shape.text_length)
        assert isinstance(compiled, jax.stages.Compiled)
        return compiled

    return (
        ProgramMaker(
            name=DENOISE_STEP,
            compile=lambda: workshop.lower_denoise_step(shape, sampler).compile(),
        ),
        ProgramMaker(name="read_text", compile=lambda: workshop.lower_read_text(shape).compile()),
        ProgramMaker(name="start", compile=lambda: workshop.lower_start(shape, sampler).compile()),
        ProgramMaker(
            name="decode", compile=lambda: workshop.lower_decode(shape, as_bytes).compile()
        ),
        ProgramMaker(name="text_encoder", compile=text_encoder),
    )


def compile_program(maker: ProgramMaker, chip: Chip) -> CompiledProgram:
    """The compiled program; a compiler's refusal becomes ProblemsFound that names config keys."""
    started = time.perf_counter()
    try:
        compiled = maker.compile()
    except ProblemsFound:
        raise
    except jax.errors.JaxRuntimeError as error:
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

"""Reports how many heads fixed-m softmax served on its fast path in a run."""

from collections.abc import Callable, Sequence

from jaxtyping import Array, Float

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.config.config import Config
from maxdiffusion.pipelines.denoise import Experts
from maxdiffusion.pipelines.fast_heads import FastHeads
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.wan import WanPipeline

Watch = Callable[[int, Float[Array, "B F Y X C"]], None]


class FastHeadReport:
    """Counts before the first and the last step of every batch, where the config asks for it."""

    def __init__(self, config: Config, plan: AttentionPlan):
        self._asked = config.report_fast_heads
        self._active = self._asked and plan.fixed_m
        self._runs = plan.runs
        self._counts: list[FastHeads] = []

    def notes(self) -> Sequence[str]:
        """What the start-up plan says of it; nothing where nobody asked."""
        if not self._asked:
            return ()
        if not self._active:
            return (f"report_fast_heads: {self._runs} has no fixed-m softmax, nothing to count",)
        return ("report_fast_heads: one more forward before the first and before the last step",)

    def compile(self, pipeline: WanPipeline, request: Request) -> None:
        """Compiles the count, if there is one."""
        if self._active:
            pipeline.compile_fast_heads(request)

    def watch(self, pipeline: WanPipeline, request: Request, experts: Experts) -> Watch | None:
        """What to call with the number of a step and the latents that it starts from, if wanted."""
        last = len(request.sampler.timesteps) - 1

        def before(step: int, latents: Float[Array, "B F Y X C"]) -> None:
            if step in (0, last):
                self._counts.append(pipeline.fast_heads(request, experts, latents, step))

        return before if self._active else None

    def lines(self) -> Sequence[str]:
        """One line per count."""
        return [count.describe() for count in self._counts]

    def as_json(self) -> list[dict[str, object]]:
        """The counts for the timing file."""
        return [count.as_json() for count in self._counts]

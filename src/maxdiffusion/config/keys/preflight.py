"""Keys of preflight_wan: what to compile for, and where the report goes."""

from maxdiffusion.config.kinds import Integer, ListOf, Text
from maxdiffusion.config.schema import used

KEYS = (
    used(
        "topology",
        Text(),
        "",
        "TPU slice that preflight_wan compiles for, such as tpu7x:2x2x1 or v6e:2x4.",
    ),
    used("report", Text(), "", "JSON file that preflight_wan writes its report to; empty = none."),
    used(
        "compare",
        ListOf(Text()),
        (),
        "Attentions that preflight_wan ranks: names, or name:UxR with the split of the context.",
    ),
    used(
        "scan_cp",
        ListOf(Integer(minimum=1)),
        (),
        "Context sizes for which preflight_wan shows how the cost grows, such as [4, 8, 16].",
    ),
)

"""Keys about how devices form a mesh: ici_ sizes within a slice, dcn_ sizes across slices."""

from collections.abc import Iterator

from maxdiffusion.config.kinds import Boolean, Choice, Integer, ListOf, Nullable, Structure, Text
from maxdiffusion.config.schema import Key, unused, used

SIZE = Integer(minimum=1, special=(-1,))
MEANINGS = {
    "data": "Devices {where} that share the batch (2 with guidance: prompt and negative apart).",
    "fsdp": "Devices {where} that share the weights, gathered layer by layer.",
    "context": "Devices {where} that share one sequence = ring x ulysses; null = those left over.",
    "ring": "Part of context {where} around which keys and values rotate; null = from context.",
    "ulysses": "Part of context {where} that trades sequence for heads; null = from context.",
    "tensor": "Devices {where} that share heads and the inside of MLPs.",
}
PLACES = {"ici": "within a slice", "dcn": "across slices"}


def sizes(place: str) -> Iterator[Key]:
    """The keys for one kind of link; -1 is filled in with what is left over."""
    for axis, meaning in MEANINGS.items():
        fixed = axis in ("data", "fsdp", "tensor")
        yield used(
            f"{place}_{axis}_parallelism",
            SIZE if fixed else Nullable(SIZE),
            1 if fixed else None,
            meaning.format(where=PLACES[place]),
        )


KEYS = (
    *sizes("ici"),
    *sizes("dcn"),
    used(
        "weight_placement",
        Choice(("auto", "replicate", "shard")),
        "auto",
        "Blocks' weights whole on each device, or spread over context; auto = whole if they fit.",
    ),
    unused(
        "allow_split_physical_axes",
        Boolean(),
        False,
        "Let a mesh axis use part of a torus axis; devices here follow a path of neighbours.",
    ),
    unused(
        "mesh_axes",
        ListOf(Text()),
        ("data", "fsdp", "context", "tensor"),
        "Names of mesh axes; here always data, fsdp, ring, ulysses, tensor.",
    ),
    unused("logical_axis_rules", Structure(), (), "Which dimension is split over which axis."),
    unused("vae_logical_axis_rules", Structure(), (), "The same for the VAE; see vae_spatial."),
    unused(
        "data_sharding",
        Structure(),
        (("data", "fsdp", "context", "tensor"),),
        "How a training batch is split.",
    ),
)

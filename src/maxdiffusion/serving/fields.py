"""The fields of a request, in one table derived from the config schema.

    config schema + what the loaded model offers --> RequestField, one per name
        validation      read_request
        OpenAPI         RequestField.schema
        form            the same schema, served as JSON
        docs            markdown_table, checked by a test

Values arrive as JSON or as text of a form; both are read by the kinds of the config's fields.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.config import Config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.config.fields import (
    Boolean,
    Choice,
    Integer,
    InvalidValue,
    Kind,
    Nullable,
    Number,
    Text,
    nearest_word,
)
from maxdiffusion.serving.errors import bad_request

LONGEST_PROMPT = 10_000  # characters
MOST_FPS = 120
LONGEST_SIDE = 8192  # pixels
MOST_FRAMES = 2001
LARGEST_SCALE = 100.0
PRIORITIES = Integer(minimum=-10, maximum=10)
SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})(?:x([0-9]{1,5}))?")
OF_MODEL = {
    "wan2.2": ("guidance_scale_high", "guidance_scale_low", "boundary_ratio"),
    "wan2.1": ("guidance_scale",),
}
CONFIG_FIELDS = (
    *("prompt", "negative_prompt", "seed", "width", "height", "num_frames", "fps"),
    *("num_inference_steps", "scheduler", "flow_shift"),
)
SHAPE_FIELDS = ("width", "height", "num_frames")


@dataclass(frozen=True, kw_only=True, order=True)
class Size:
    """Width, height and frames of a video."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @classmethod
    def parse(cls, text: str, frames: int | None = None) -> "Size | None":
        """Returns the size that a text spells; `frames` completes WIDTHxHEIGHT."""
        found = SIZE.fullmatch(text)
        if found is None or (found[3] is None and frames is None):
            return None
        return cls(width=int(found[1]), height=int(found[2]), frames=int(found[3] or frames or 0))

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.width * self.height * self.frames


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Requests that the loaded model can fulfil."""

    model: str
    model_name: str
    sizes: tuple[Size, ...]
    compiles_other_sizes: bool
    size_multiple: int
    frame_step: int
    most_pixels: int
    schedulers: tuple[str, ...]
    max_steps: int
    defaults: Mapping[str, Any]
    images: str = "none"  # or optional, required
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, **facts: Any) -> "Offer":
        """Returns the offer of a config; `facts` come from the model."""
        names = (*CONFIG_FIELDS, *OF_MODEL[config.model_name])
        defaults = {name: config.values[name] for name in names}
        if isinstance(config.prompt, tuple):
            defaults["prompt"] = config.prompt[0]
        return cls(
            model=config.pretrained_model_name_or_path,
            model_name=config.model_name,
            compiles_other_sizes=config.serve_other_sizes == "compile",
            max_steps=config.serve_max_steps,
            defaults=defaults,
            **facts,
        )


@dataclass(frozen=True, kw_only=True)
class ShortText(Kind[str]):
    """Text of a limited length that is not empty."""

    longest: int
    shortest: int = 1

    def describe(self) -> str:
        return f"text of {self.shortest} to {self.longest} characters"

    def convert(self, value: object) -> str:
        text = Text().convert(value)
        if not self.shortest <= len(text.strip()) or len(text) > self.longest:
            raise self.refuse()
        return text


class StartImage(Kind[str]):
    """An image; requests carry it as a file or a data: URL, jobs its digest."""

    def describe(self) -> str:
        return "a PNG, JPEG or WebP file, or a data: URL"

    def convert(self, value: object) -> str:
        return Text().convert(value)


@dataclass(frozen=True, kw_only=True)
class RequestField:
    """One field of a request: the values it takes, its default and its meaning."""

    name: str
    kind: Kind[Any]
    meaning: str
    default: Any = None
    required: bool = False

    def read(self, value: object) -> Any:
        """Returns the typed value; raises ApiError with the name of the field."""
        try:
            return self.kind.parse(value) if isinstance(value, str) else self.kind.read(value)
        except InvalidValue as error:
            remedy = f" {error.remedy}." if error.remedy else ""
            message = f"{self.name}={shown(value)}: {error.rule}.{remedy}"
            raise bad_request(message, param=self.name, code="invalid_value") from None

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the values."""
        found = kind_schema(self.kind) | {"description": self.meaning}
        return found if self.default is None else found | {"default": self.default}


def shown(value: object) -> str:
    """Returns a value as it appears in messages, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def kind_schema(kind: Kind[Any]) -> dict[str, Any]:
    """Returns the JSON schema of a kind of values."""
    if isinstance(kind, Nullable):
        inner = kind_schema(kind.kind)
        return inner | {"type": [inner["type"], "null"]}
    if isinstance(kind, Boolean):
        return {"type": "boolean"}
    if isinstance(kind, StartImage):
        return {"type": "string", "contentMediaType": "image/*"}
    if isinstance(kind, Choice):
        return {"type": "string", "enum": list(kind.words)}
    if isinstance(kind, ShortText):
        return {"type": "string", "minLength": kind.shortest, "maxLength": kind.longest}
    if isinstance(kind, Integer):
        step = {"multipleOf": kind.step} if kind.step > 1 and not kind.offset else {}
        limits = {"minimum": kind.minimum, "maximum": kind.maximum}
        return {"type": "integer", **step, **{n: v for n, v in limits.items() if v is not None}}
    if isinstance(kind, Number):
        limits_of_number = {
            "minimum": kind.minimum,
            "maximum": kind.maximum,
            "exclusiveMinimum": kind.above,
        }
        given = {n: v for n, v in limits_of_number.items() if v is not None}
        return {"type": "number", **given}
    return {"type": "string"}


def narrowed(name: str, offer: Offer) -> Kind[Any]:
    """Returns the kind of a config field, with the limits of a public server."""
    kind = FIELDS[name].kind
    if name == "prompt":
        return ShortText(longest=LONGEST_PROMPT)
    if name == "negative_prompt":
        return ShortText(longest=LONGEST_PROMPT, shortest=0)
    if name == "scheduler":
        return Choice(offer.schedulers)
    if isinstance(kind, Nullable):
        kind = kind.kind
    largest = {
        "num_inference_steps": offer.max_steps,
        "fps": MOST_FPS,
        "width": LONGEST_SIDE,
        "height": LONGEST_SIDE,
        "num_frames": MOST_FRAMES,
    }
    if isinstance(kind, Integer) and name in largest:
        return dataclasses.replace(kind, maximum=largest[name])
    if isinstance(kind, Number) and (kind.maximum is None):
        low = {} if kind.above is not None or kind.minimum is not None else {"minimum": 0.0}
        return dataclasses.replace(kind, maximum=LARGEST_SCALE, **low)
    return kind


def request_fields(offer: Offer) -> dict[str, RequestField]:
    """Returns the table of all fields that a request may have."""
    listed = ", ".join(map(str, offer.sizes))
    names = (*CONFIG_FIELDS, *OF_MODEL[offer.model_name])
    table = {
        name: RequestField(
            name=name,
            kind=narrowed(name, offer),
            meaning=FIELDS[name].meaning,
            default=None if name == "prompt" else offer.defaults[name],
            required=name == "prompt",
        )
        for name in names
    }
    own = (
        RequestField(name="model", kind=Choice((offer.model,)), meaning="Name of the model."),
        RequestField(
            name="size",
            kind=ShortText(longest=20),
            meaning=f"WIDTHxHEIGHT, instead of width and height. Served: {listed}.",
        ),
        RequestField(
            name="seconds",
            kind=Number(above=0, maximum=3600),
            meaning="Length of the video, instead of num_frames; the nearest number of frames.",
        ),
        RequestField(
            name="priority",
            kind=PRIORITIES,
            meaning="Jobs with a higher number run first.",
            default=0,
        ),
    )
    image = RequestField(
        name="input_reference",
        kind=StartImage(),
        meaning="The first image of the video.",
        required=offer.images == "required",
    )
    images = {image.name: image} if offer.images != "none" else {}
    return table | {field.name: field for field in own} | images


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request whose values are all typed and complete."""

    fields: Mapping[str, Any]
    size: Size
    priority: int


def read_request(
    offer: Offer, given: Mapping[str, object], base: Mapping[str, Any] | None = None
) -> CheckedRequest:
    """Returns the request of the given fields; `base` replaces the defaults of the config.

    Raises ApiError for the first field that is unknown or invalid.
    """
    table = request_fields(offer)
    refuse_unknown(given, table, offer)
    values = {name: table[name].read(value) for name, value in given.items() if value is not None}
    if not str(values.get("prompt", "")).strip() and base is None:
        raise bad_request("prompt is required.", param="prompt", code="missing_field")
    if offer.images == "required" and "input_reference" not in {**(base or {}), **values}:
        message = f"input_reference: {offer.model} begins with an image."
        raise bad_request(message, param="input_reference", code="missing_field")
    priority = values.pop("priority", 0)
    values.pop("model", None)
    size = choose_size(offer, values, {**offer.defaults, **(base or {})})
    for name in ("size", "seconds"):
        values.pop(name, None)
    shape = {"width": size.width, "height": size.height, "num_frames": size.frames}
    fields = {**offer.defaults, **(base or {}), **values, **shape}
    return CheckedRequest(fields=fields, size=size, priority=priority)


def refuse_unknown(
    given: Mapping[str, object], table: Mapping[str, RequestField], offer: Offer
) -> None:
    """Raises ApiError for a field that the table does not have."""
    for name, value in given.items():
        if name in table:
            continue
        if name.partition("[")[0] == "input_reference":
            message = f"input_reference: {offer.model} makes videos from text only. Leave it out."
            raise bad_request(message, param="input_reference", code="not_offered")
        if name in FIELDS and name not in OF_MODEL.get(offer.model_name, ()):
            message = f"{name}={shown(value)}: is set by the server, not by a request."
            raise bad_request(message, param=name, code="not_offered")
        remedy = nearest_word(name, tuple(table)) or f"Known fields: {', '.join(table)}"
        message = f"{shown(name)} is not a known field. {remedy}."
        raise bad_request(message, param=name[:100], code="unknown_field")


def choose_size(offer: Offer, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Size:
    """Returns the size that a request means: given parts are kept, others follow the list."""
    wanted = wanted_parts(values, defaults)
    usual = Size(
        width=wanted.get("width", defaults["width"]),
        height=wanted.get("height", defaults["height"]),
        frames=wanted.get("num_frames", defaults["num_frames"]),
    )
    if usual in offer.sizes:
        return usual
    for size in offer.sizes:
        parts = {"width": size.width, "height": size.height, "num_frames": size.frames}
        if all(parts[name] == value for name, value in wanted.items()):
            return size
    check_other_size(offer, usual, wanted)
    return usual


def wanted_parts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, int]:
    """Returns width, height and num_frames as far as a request states them."""
    wanted = {name: values[name] for name in SHAPE_FIELDS if name in values}
    if "size" in values:
        size = Size.parse(values["size"], frames=0)
        if size is None or SIZE.fullmatch(values["size"])[3]:  # type: ignore[index]
            message = f"size={shown(values['size'])}: must be WIDTHxHEIGHT, such as 1280x720."
            raise bad_request(message, param="size", code="invalid_value")
        wanted |= agreed(wanted, "size", width=size.width, height=size.height)
    if "seconds" in values:
        fps = values.get("fps", defaults["fps"])
        frames = max(1, round(values["seconds"] * fps / 4) * 4 + 1)
        wanted |= agreed(wanted, "seconds", num_frames=frames)
    return wanted


def agreed(wanted: Mapping[str, int], name: str, **parts: int) -> dict[str, int]:
    """Returns the parts that a field stands for; raises if others contradict them."""
    for part, value in parts.items():
        if wanted.get(part, value) != value:
            message = f"{name} means {part}={value}, and {part}={wanted[part]} is given too."
            raise bad_request(message, param=name, code="invalid_value")
    return parts


def check_other_size(offer: Offer, size: Size, wanted: Mapping[str, int]) -> None:
    """Raises ApiError unless a size that is not compiled may be made."""
    param = "num_frames" if set(wanted) == {"num_frames"} else "size"
    listed = ", ".join(map(str, offer.sizes))
    if not offer.compiles_other_sizes:
        near = min(offer.sizes, key=lambda one: abs(one.pixels - size.pixels))
        message = (
            f"{size} (width x height x frames) is not served. Served: {listed}. The nearest is "
            f"{near}."
        )
        raise bad_request(message, param=param, code="size_not_served")
    multiple, step = offer.size_multiple, offer.frame_step
    if size.width % multiple or size.height % multiple or (size.frames - 1) % step:
        message = f"{size}: width and height must be multiples of {multiple}, frames {step}n + 1."
        raise bad_request(message, param=param, code="invalid_value")
    if size.pixels > offer.most_pixels:
        message = (
            f"{size} has {size.pixels} pixels, and {offer.most_pixels} fit into the memory of the "
            f"devices. Served: {listed}."
        )
        raise bad_request(message, param=param, code="size_too_large")


def markdown_table(table: Mapping[str, RequestField]) -> str:
    """Returns the table of fields for docs/serving.md."""
    lines = ["| field | values | meaning |", "|---|---|---|"]
    for field in table.values():
        needed = " (required)" if field.required else ""
        lines.append(f"| `{field.name}`{needed} | {field.kind.describe()} | {field.meaning} |")
    return "\n".join(lines)


def form_values(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a form; raises ApiError for a name that comes twice."""
    values: dict[str, Any] = {}
    for name, value in items:
        if name in values:
            raise bad_request(
                f"{shown(name)} is given twice.", param=name[:100], code="repeated_field"
            )
        values[name] = value
    return values

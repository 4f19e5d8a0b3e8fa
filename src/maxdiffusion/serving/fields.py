"""The fields of a request, in one table derived from the config schema.

    config schema + what the loaded model offers --> RequestField, one per name
        validation      read_request
        OpenAPI         RequestField.schema
        form            the same schema, served as JSON
        docs            markdown_table, checked by a test

Values arrive as JSON or as text of a form; both are read by the kinds of the config's fields.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.serving.errors import bad_request
from maxdiffusion.serving.offer import ADAPTER, SIZE, STEP_FIELDS, Offer, Size
from maxdiffusion.serving.uploads import UPLOADS, Upload

LONGEST_PROMPT = 10_000  # characters
MOST_FPS = 120
LONGEST_SIDE = 8192  # pixels
MOST_FRAMES = 2001
LARGEST_SCALE = 100.0
PRIORITIES = Integer(minimum=-10, maximum=10)
STRENGTHS = Number(minimum=-4, maximum=4)
SHAPE_FIELDS = ("width", "height", "num_frames")


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


@dataclass(frozen=True, kw_only=True)
class UploadedFile(Kind[Any]):
    """An image or a video; requests carry it as a file or a data: URL, jobs its digest."""

    upload: Upload

    def describe(self) -> str:
        kinds = f"{self.upload.formats} file, or a data: URL"
        return f"up to {self.upload.most}, each a {kinds}" if self.upload.most > 1 else f"a {kinds}"

    def convert(self, value: object) -> Any:
        if self.upload.most == 1:
            return Text().convert(value)
        if not isinstance(value, list) or not 1 <= len(value) <= self.upload.most:
            raise self.refuse()
        return [Text().convert(one) for one in value]


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
    if isinstance(kind, UploadedFile):
        one = {"type": "string", "contentMediaType": f"{kind.upload.medium}/*"}
        most = kind.upload.most
        return one if most == 1 else {"type": "array", "items": one, "maxItems": most}
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
    if name == "conditioning_scale":
        return Number(minimum=0, maximum=LARGEST_SCALE)
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
    table = {
        name: RequestField(
            name=name,
            kind=narrowed(name, offer),
            meaning=FIELDS[name].meaning,
            default=None if name == "prompt" else offer.defaults[name],
            required=name == "prompt",
        )
        for name in offer.config_fields
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
    optional = (*preset_fields(offer), *adapter_fields(offer), *input_fields(offer))
    return table | {field.name: field for field in (*own, *optional)}


def preset_fields(offer: Offer) -> tuple[RequestField, ...]:
    """Returns the field that names a preset, if there are any."""
    if not offer.presets:
        return ()
    meaning = "Named set of values; fields that a request states have precedence."
    kind = Choice(tuple(offer.presets))
    return (RequestField(name="preset", kind=kind, meaning=meaning),)


def adapter_fields(offer: Offer) -> tuple[RequestField, ...]:
    """Returns a field for every adapter that the server has loaded."""
    return tuple(
        RequestField(
            name=f"{ADAPTER}{name}",
            kind=STRENGTHS,
            meaning=f"Factor on the strength that the server's config gives the adapter {name}; "
            "0 = without it.",
            default=1.0,
        )
        for name in offer.adapters
    )


def input_fields(offer: Offer) -> tuple[RequestField, ...]:
    """Returns a field for every image or video that the model takes."""
    return tuple(
        RequestField(
            name=name,
            kind=UploadedFile(upload=UPLOADS[name]),
            meaning=UPLOADS[name].meaning,
            required=required,
        )
        for name, required in offer.inputs.items()
    )


def check_presets(offer: Offer) -> None:
    """Raises everything that is wrong with the presets of a server."""
    table, problems = request_fields(offer), Collector()
    allowed = {*offer.defaults, *STEP_FIELDS} - {"prompt", *SHAPE_FIELDS}
    for preset, values in offer.presets.items():
        for name, value in values.items():
            place = f"serve_presets.{preset}.{name}"
            if name not in allowed:
                rule, remedy = "a preset cannot set it", f"Use: {', '.join(sorted(allowed))}"
                problems.problems.append(Problem(name=place, value=value, rule=rule, remedy=remedy))
                continue
            try:
                (table[name].kind if name in table else FIELDS[name].kind).read(value)
            except InvalidValue as error:
                problems.problems.append(
                    Problem(name=place, value=value, rule=error.rule, remedy=error.remedy)
                )
        with problems:
            if not problems.problems:
                check_steps_of(preset, values)
    problems.raise_if_any()


def check_steps_of(preset: str, values: Mapping[str, Any]) -> None:
    """Raises if a preset has both a number of steps and a list of another length."""
    levels = values.get("sigmas") or values.get("denoising_step_list")
    steps = values.get("num_inference_steps")
    if levels and steps is not None and steps != len(levels):
        rule = f"the list of this preset has {len(levels)} steps"
        place = f"serve_presets.{preset}.num_inference_steps"
        raise ProblemsFound([Problem(name=place, value=steps, rule=rule, remedy="Leave it out")])


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request whose values are all typed and complete."""

    fields: Mapping[str, Any]
    size: Size
    priority: int
    steps: int


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
    known = {**offer.defaults, **(base or {})}
    chosen = offer.presets[values.pop("preset")] if "preset" in values else {}
    check_inputs(offer, {**known, **values})
    priority = values.pop("priority", 0)
    values.pop("model", None)
    kept = {name: known[name] for name in SHAPE_FIELDS} if base is not None else {}
    states_shape = not {*SHAPE_FIELDS, "size", "seconds"}.isdisjoint(values)
    size = choose_size(offer, values if states_shape else {**values, **kept}, {**known, **chosen})
    for name in ("size", "seconds"):
        values.pop(name, None)
    shape = {"width": size.width, "height": size.height, "num_frames": size.frames}
    fields = {**known, **chosen, **values, **shape}
    steps = count_steps(offer, fields, stated=values.get("num_inference_steps"))
    fields["num_inference_steps"] = steps
    if "input_video" in fields and "strength" in fields:
        steps = steps_of_strength(steps, fields["strength"])
    return CheckedRequest(fields=fields, size=size, priority=priority, steps=steps)


def check_inputs(offer: Offer, fields: Mapping[str, Any]) -> None:
    """Raises ApiError for an input that is missing."""
    missing = [name for name, needed in offer.inputs.items() if needed and name not in fields]
    if missing:
        message = f"{missing[0]}: {offer.model} needs {UPLOADS[missing[0]].meaning.lower()}"
        raise bad_request(message, param=missing[0], code="missing_field")
    if "input_mask" in fields and "input_video" not in fields:
        message = "input_mask: a mask needs input_video."
        raise bad_request(message, param="input_mask", code="missing_field")


def count_steps(offer: Offer, fields: Mapping[str, Any], stated: int | None) -> int:
    """Returns the denoise steps of a request; a list of noise levels has a fixed number."""
    of_config = offer.levels if {"sigmas", "denoising_step_list"}.isdisjoint(fields) else ()
    levels = fields.get("sigmas") or fields.get("denoising_step_list") or of_config
    if not levels:
        return fields["num_inference_steps"]
    if stated not in (None, len(levels)):
        message = f"num_inference_steps={stated}: the noise levels in use are for {len(levels)}."
        raise bad_request(message, param="num_inference_steps", code="invalid_value")
    return len(levels)


def steps_of_strength(steps: int, strength: float) -> int:
    """Returns the steps that video to video runs; raises ApiError if there are none."""
    running = int(steps * strength)
    if running < 1:
        message = f"strength={strength:g}: leaves none of the {steps} steps. Raise it."
        raise bad_request(message, param="strength", code="invalid_value")
    return min(running, steps)


def refuse_unknown(
    given: Mapping[str, object], table: Mapping[str, RequestField], offer: Offer
) -> None:
    """Raises ApiError for a field that the table does not have."""
    for name, value in given.items():
        if name in table:
            continue
        plain = name.partition("[")[0]
        if plain in UPLOADS:
            message = f"{plain}: {offer.model} does not take it. Leave it out."
            raise bad_request(message, param=plain, code="not_offered")
        if name in FIELDS:
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
    """Returns the fields of a form; raises ApiError for a name that comes twice.

    Several files of one field come under its name or, as the `openai` package writes lists, NAME[].
    """
    values: dict[str, Any] = {}
    for written, value in items:
        name = written.removesuffix("[]")
        if name in UPLOADS and UPLOADS[name].most > 1:
            values.setdefault(name, []).append(value)
        elif written in values:
            raise bad_request(
                f"{shown(written)} is given twice.", param=written[:100], code="repeated_field"
            )
        else:
            values[written] = value
    return values

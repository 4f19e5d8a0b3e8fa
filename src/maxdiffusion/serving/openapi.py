"""The OpenAPI 3.1 description of the server, made from the table of request fields."""

from typing import Any

from maxdiffusion import __version__
from maxdiffusion.serving.fields import request_fields
from maxdiffusion.serving.offer import Offer

NULLABLE_TIME = {"type": ["integer", "null"], "description": "Seconds since 1970."}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
VIDEO: dict[str, Any] = {
    "type": "object",
    "required": [
        *("id", "object", "model", "status", "progress", "created_at", "completed_at"),
        *("expires_at", "seconds", "size", "prompt", "remixed_from_video_id", "error"),
    ],
    "properties": {
        "id": {"type": "string", "pattern": "^video_[0-9a-f]{32}$"},
        "object": {"const": "video"},
        "model": {"type": "string"},
        "status": {"enum": ["queued", "in_progress", "completed", "failed"]},
        "progress": {"type": "integer", "minimum": 0, "maximum": 100},
        "created_at": {"type": "integer"},
        "started_at": NULLABLE_TIME,
        "completed_at": NULLABLE_TIME,
        "expires_at": NULLABLE_TIME,
        "seconds": {"type": "string"},
        "size": {"type": "string"},
        "prompt": {"type": "string"},
        "remixed_from_video_id": {"type": ["string", "null"]},
        "error": {
            "type": ["object", "null"],
            "required": ["code", "message"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        },
        "stage": {"type": "string"},
        "reason": {"type": ["string", "null"], "description": "Why a queued job does not run."},
        "step": {"type": ["integer", "null"]},
        "steps": {"type": "integer"},
        "queue_position": {"type": ["integer", "null"]},
        "eta_seconds": {"type": ["number", "null"]},
        "priority": {"type": "integer"},
        "settings": {"type": "object"},
        "timings": {"type": ["object", "null"]},
        "bytes": {"type": ["integer", "null"]},
    },
}
LIST: dict[str, Any] = {
    "type": "object",
    "required": ["object", "data", "first_id", "last_id", "has_more"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Video"}},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    },
}
DELETED: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "deleted"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "video.deleted"},
        "deleted": {"const": True},
    },
}
MODEL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}
REFUSALS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The key is missing or not valid.",
    "403": "The Host or Origin header is not allowed.",
    "404": "There is no such video.",
    "409": "The state of the job forbids it.",
    "413": "The body is too large.",
    "415": "The body is neither a form nor JSON.",
    "422": "The Idempotency-Key was used for another request.",
    "429": "The queue is full.",
    "503": "The server is not ready, or stops.",
    "507": "The disk is full.",
}


def reference(name: str) -> dict[str, str]:
    """Returns a reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_content(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a JSON body."""
    return {"application/json": {"schema": schema}}


def responses(meaning: str, content: dict[str, Any], *codes: str) -> dict[str, Any]:
    """Returns the answers of an operation: the one that succeeds, and errors."""
    errors = {
        code: {"description": REFUSALS[code], "content": json_content(reference("Error"))}
        for code in ("401", "403", "413", *codes)
    }
    return {"200": {"description": meaning, "content": content}, **errors}


def request_schema(offer: Offer, *, required: bool = True) -> dict[str, Any]:
    """Returns the schema of the body of a request."""
    table = request_fields(offer)
    needed = [name for name, field in table.items() if field.required]
    return {
        "type": "object",
        "properties": {name: field.schema() for name, field in table.items()},
        "required": needed if required else [],
        "additionalProperties": False,
    }


def document(offer: Offer, *, has_keys: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of a server."""
    security: list[dict[str, Any]] = [{"key": []}] if has_keys else []
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "maxdiffusion",
            "version": __version__,
            "description": f"Videos from text with {offer.model}.",
        },
        "paths": {**video_paths(offer), **other_paths()},
        "security": security,
        "components": {
            "schemas": {
                "Video": VIDEO,
                "VideoList": LIST,
                "DeletedVideo": DELETED,
                "Model": MODEL,
                "Error": ERROR,
                "VideoRequest": request_schema(offer),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def parameter(name: str, where: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter of an operation."""
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def video_paths(offer: Offer) -> dict[str, Any]:
    """Returns the operations on videos."""
    body = {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": reference("VideoRequest")},
            "application/json": {"schema": reference("VideoRequest")},
        },
    }
    remix = {"required": True, "content": json_content(reference("VideoRequest"))}
    video = json_content(reference("Video"))
    identifier = [parameter("identifier", "path", {"type": "string"})]
    key = parameter("Idempotency-Key", "header", {"type": "string", "maxLength": 255})
    variants = {"enum": ["video", "thumbnail", "spritesheet"], "default": "video"}
    binary = {"type": "string", "contentMediaType": "application/octet-stream"}
    files = {kind: {"schema": binary} for kind in ("video/mp4", "image/webp", "image/jpeg")}
    paging = [
        parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}),
        parameter("after", "query", {"type": "string"}),
        parameter("order", "query", {"enum": ["asc", "desc"]}),
    ]
    refused = ("400", "415", "422", "429", "503", "507")
    one = "/v1/videos/{identifier}"
    return {
        "/v1/videos": {
            "post": {
                "operationId": "create",
                "parameters": [key],
                "requestBody": body,
                "responses": responses("The queued video.", video, *refused),
            },
            "get": {
                "operationId": "list",
                "parameters": paging,
                "responses": responses("A page.", json_content(reference("VideoList")), "400"),
            },
        },
        one: {
            "parameters": identifier,
            "get": {
                "operationId": "retrieve",
                "responses": responses("The video.", video, "404"),
            },
            "delete": {
                "operationId": "delete",
                "responses": responses("Gone.", json_content(reference("DeletedVideo")), "404"),
            },
        },
        f"{one}/content": {
            "parameters": [*identifier, parameter("variant", "query", variants)],
            "get": {
                "operationId": "content",
                "responses": responses("The file.", files, "400", "404", "409"),
            },
        },
        f"{one}/cancel": {
            "parameters": identifier,
            "post": {
                "operationId": "cancel",
                "responses": responses("The video.", video, "404", "409"),
            },
        },
        f"{one}/remix": {
            "parameters": identifier,
            "post": {
                "operationId": "remix",
                "parameters": [key],
                "requestBody": remix,
                "responses": responses("The queued video.", video, "404", *refused),
            },
        },
    }


def other_paths() -> dict[str, Any]:
    """Returns the operations on models and health."""
    anything = json_content({"type": "object"})
    models = json_content(
        {
            "type": "object",
            "properties": {"data": {"type": "array", "items": reference("Model")}},
        }
    )
    return {
        "/v1/models": {
            "get": {"operationId": "models", "responses": responses("The models.", models)}
        },
        "/livez": {
            "get": {"operationId": "livez", "responses": responses("Alive.", anything, "503")}
        },
        "/readyz": {
            "get": {"operationId": "readyz", "responses": responses("Ready.", anything, "503")}
        },
    }

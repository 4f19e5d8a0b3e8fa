"""Routes of the server: the videos contract of the `openai` package, models, health, page.

    POST   /v1/videos                multipart or JSON -> a queued job
    GET    /v1/videos                jobs, newest first, in pages
    GET    /v1/videos/{id}           one job: status, progress, queue position, estimate
    DELETE /v1/videos/{id}           ends it if it runs, and removes it
    GET    /v1/videos/{id}/content   video, thumbnail or spritesheet; ranges
    POST   /v1/videos/{id}/cancel    ends it and keeps its record
    POST   /v1/videos/{id}/remix     the same settings with another prompt
    GET    /v1/events                state of all jobs, whenever it changes

Handlers read the queue directly, which takes less than a millisecond; commits run in a thread.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.serving.errors import (
    NO_RETRY,
    ApiError,
    bad_request,
    conflict,
    not_found,
    on_api_error,
    on_http_exception,
    on_unexpected,
    refused,
)
from maxdiffusion.serving.fields import (
    CheckedRequest,
    form_values,
    read_request,
    request_fields,
    shown,
)
from maxdiffusion.serving.library import IDENTIFIER, MEDIA_TYPES, SUFFIXES, VIDEO
from maxdiffusion.serving.metrics import MEDIA_TYPE
from maxdiffusion.serving.offer import Offer
from maxdiffusion.serving.openapi import document
from maxdiffusion.serving.queue import JobQueue, disk_full
from maxdiffusion.serving.security import COOKIE, Access, Guard
from maxdiffusion.serving.store import COMPLETED, FAILED, Job, NewJob, now
from maxdiffusion.serving.uploads import UPLOADS, given_files

PAGE = Path(__file__).parent / "page"
MOST_FIELDS = 64
MOST_FILES = sum(upload.most for upload in UPLOADS.values())
MOST_FIELD_BYTES = 1 << 25  # a data: URL; the whole body has its own limit
MOST_LISTED = 100
MOST_SHOWN = 60  # jobs in one event
MOST_STREAMS = 64
EVENT_SECONDS = 0.2  # at least, between two events of a stream
COMMENT_SECONDS = 15.0
LONGEST_KEY = 255
POLL_MILLISECONDS = "1000"
UNSUPPORTED = ("edits", "extensions", "characters")


def video_object(queue: JobQueue, job: Job, model: str) -> dict[str, Any]:
    """Returns a job as clients see it: the contract's fields, then ours."""
    live = queue.live(job.id)
    position, seconds = queue.position(job)
    fields, reason = job.fields, queue.reason(job.id)
    waiting = "compiling" if reason else job.status
    progress = 100 if job.status == COMPLETED else live.percent if live else job.progress
    return {
        "id": job.id,
        "object": "video",
        "model": model,
        "status": job.status,
        "progress": progress,
        "created_at": job.created_at,
        "completed_at": job.completed_at if job.status == COMPLETED else None,
        "expires_at": job.expires_at,
        "seconds": f"{fields['num_frames'] / fields['fps']:g}",
        "size": f"{fields['width']}x{fields['height']}",
        "prompt": fields["prompt"],
        "remixed_from_video_id": job.remixed_from,
        "error": dict(job.error) if job.error else None,
        "stage": live.stage if live else waiting,
        "reason": reason,
        "step": live.step if live else None,
        "steps": job.steps,
        "preview_step": live.preview_step if live and live.preview else None,
        "queue_position": position,
        "eta_seconds": None if seconds is None else round(seconds, 1),
        "started_at": job.started_at,
        "priority": job.priority,
        "settings": {name: value for name, value in fields.items() if name != "prompt"},
        "timings": dict(job.timings) if job.timings else None,
        "bytes": job.bytes or None,
    }


class Api:
    """The handlers, with the queue and the offer that they serve."""

    def __init__(self, queue: JobQueue, offer: Offer, access: Access, *, hang_seconds: float):
        self.queue, self.offer, self.access = queue, offer, access
        self.hang_seconds = hang_seconds
        self.closing = asyncio.Event()
        self._streams = 0
        self._started = now()

    def view(self, job: Job) -> dict[str, Any]:
        """Returns a job as clients see it."""
        return video_object(self.queue, job, self.offer.model)

    def find(self, request: Request) -> Job:
        """Returns the job that a path names; raises if it is not one of the sender's."""
        identifier = request.path_params["identifier"]
        known = IDENTIFIER.fullmatch(identifier)
        job = self.queue.store.get(identifier, request.state.owner) if known else None
        if job is None:
            raise not_found(identifier)
        return job

    async def create(self, request: Request) -> Response:
        """Queues a video."""
        given = await self.keep_files(await read_body(request))
        checked = await self.checked(given)
        return await self.submit(request, new_job(request.state.owner, checked))

    async def checked(
        self, given: Mapping[str, Any], base: Mapping[str, Any] | None = None
    ) -> CheckedRequest:
        """Returns the request of the given fields; raises ApiError for what cannot be made."""
        checked = read_request(self.offer, given, base=base)
        try:
            await run_in_threadpool(self.offer.check, checked.fields)
        except ProblemsFound as found:
            raise refused(found) from None
        return checked

    async def remix(self, request: Request) -> Response:
        """Queues a video with the settings of another one and a new prompt."""
        source = self.find(request)
        given = await self.keep_files(await read_body(request))
        if not given.get("prompt"):
            raise bad_request("prompt is required.", param="prompt", code="missing_field")
        checked = await self.checked(given, base=source.fields)
        return await self.submit(request, new_job(request.state.owner, checked, source.id))

    async def keep_files(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stores the files of a request; their digests take their place.

        Nothing is kept of files that the model does not take: the table of fields refuses them.
        """
        files, others = given_files(fields, self.offer.inputs)
        if not files:
            return {name: printable(value) for name, value in others.items()}
        kept = await run_in_threadpool(self.queue.files.keep_all, files)
        return {name: printable(value) for name, value in others.items()} | kept

    async def submit(self, request: Request, new: NewJob) -> Response:
        """Commits a job and answers with it."""
        if self.queue.stopping.is_set():
            raise stopping()
        idempotency = idempotency_of(request, new)
        try:
            job, _ = await run_in_threadpool(self.queue.submit, new, idempotency)
        except OperationalError as error:
            if "full" in str(error.orig):
                raise disk_full() from None
            raise
        return JSONResponse(self.view(job), headers={"openai-poll-after-ms": POLL_MILLISECONDS})

    async def list_videos(self, request: Request) -> Response:
        """Lists the sender's videos."""
        parameters = request.query_params
        limit = parameters.get("limit", "20")
        if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit) <= MOST_LISTED:
            message = f"limit={shown(limit)}: must be an integer from 1 to {MOST_LISTED}."
            raise bad_request(message, param="limit", code="invalid_value")
        order = parameters.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request("order: must be asc or desc.", param="order", code="invalid_value")
        after = None
        if parameters.get("after"):
            after = self.queue.store.get(parameters["after"], request.state.owner)
            if after is None:
                message = "after: no such video. Begin with the first page again."
                raise bad_request(message, param="after", code="invalid_value")
        jobs, more = self.queue.store.page(
            request.state.owner, limit=int(limit), after=after, newest_first=order == "desc"
        )
        return JSONResponse(
            {
                "object": "list",
                "data": [self.view(job) for job in jobs],
                "first_id": jobs[0].id if jobs else None,
                "last_id": jobs[-1].id if jobs else None,
                "has_more": more,
            }
        )

    async def retrieve(self, request: Request) -> Response:
        """Returns one video."""
        return JSONResponse(
            self.view(self.find(request)), headers={"openai-poll-after-ms": POLL_MILLISECONDS}
        )

    async def delete(self, request: Request) -> Response:
        """Removes a video; one that runs ends at its next step."""
        job = self.find(request)
        if not await run_in_threadpool(self.queue.remove, job.id, request.state.owner):
            raise not_found(job.id)
        return JSONResponse({"id": job.id, "object": "video.deleted", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Ends a video that waits or runs."""
        job = self.find(request)
        if not job.is_active:
            raise conflict(f"The job is {job.status} already.", code="not_active")
        cancelled = await run_in_threadpool(self.queue.cancel, job.id, request.state.owner)
        if cancelled is None:
            raise not_found(job.id)
        return JSONResponse(self.view(cancelled))

    async def content(self, request: Request) -> Response:
        """Returns the file of a video, its thumbnail or its spritesheet."""
        job = self.find(request)
        variant = request.query_params.get("variant") or VIDEO
        if variant not in SUFFIXES:
            message = f"variant={shown(variant)}: must be one of {', '.join(SUFFIXES)}."
            raise bad_request(message, param="variant", code="invalid_value")
        if job.status == FAILED:
            message = f"The job failed: {(job.error or {}).get('message', '')}"
            raise conflict(message, code="failed")
        if job.status != COMPLETED:
            raise conflict(f"The video is not ready: {job.status}.", code="not_ready")
        try:
            path = await run_in_threadpool(self.queue.library.readable, job.id, variant)
        except FileNotFoundError:
            raise ApiError(404, "The file is gone.", code="lost") from None
        return FileResponse(
            path,
            media_type=MEDIA_TYPES[variant],
            filename=f"{job.id}{SUFFIXES[variant]}",
            content_disposition_type="inline",
            headers={"Cache-Control": "private, max-age=3600"},
        )

    async def preview(self, request: Request) -> Response:
        """Returns the newest preview of a video that is being made."""
        self.queue.watch()
        live = self.queue.live(self.find(request).id)
        if live is None or live.preview is None:
            raise ApiError(404, "There is no preview yet.", code="not_ready", headers=NO_RETRY)
        headers = {"Cache-Control": "no-store", "x-step": str(live.preview_step)}
        return Response(live.preview, media_type="image/webp", headers=headers)

    async def unsupported(self, request: Request) -> Response:
        """Refuses the parts of the contract that this model cannot do."""
        message = (
            f"{self.offer.model} makes new videos from text: {request.url.path} needs a video."
        )
        raise bad_request(message, code="not_offered")

    async def models(self, request: Request) -> Response:
        """Lists the one model."""
        return JSONResponse({"object": "list", "data": [self.model_object()]})

    async def model(self, request: Request) -> Response:
        """Returns the one model."""
        name = request.path_params["model"]
        if name != self.offer.model:
            message = f"No model {shown(name)}. This server has {self.offer.model!r}."
            raise ApiError(404, message, code="model_not_found", param="model")
        return JSONResponse(self.model_object())

    def model_object(self) -> dict[str, Any]:
        """Returns the model as clients see it."""
        return {
            "id": self.offer.model,
            "object": "model",
            "created": self._started,
            "owned_by": "maxdiffusion",
        }

    # Health, page

    async def livez(self, request: Request) -> Response:
        """Says whether the device loop still moves; restarting helps if it does not."""
        quiet = self.queue.quiet_seconds
        alive = quiet < self.hang_seconds
        return JSONResponse(
            {"alive": alive, "quiet_seconds": round(quiet, 1)}, status_code=200 if alive else 503
        )

    async def readyz(self, request: Request) -> Response:
        """Says whether videos are made: weights loaded, sizes compiled, not stopping."""
        ready = self.queue.ready and not self.queue.stopping.is_set()
        headers = {} if ready else {"Retry-After": "5"}
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics."""
        return Response(self.queue.metrics.text(), headers={"Content-Type": MEDIA_TYPE})

    async def openapi(self, request: Request) -> Response:
        """Returns the description of this interface."""
        return JSONResponse(document(self.offer, has_keys=bool(self.access.keys)))

    async def server(self, request: Request) -> Response:
        """Returns what the page needs to know: fields, sizes, the plan of the model."""
        table = request_fields(self.offer)
        fields = {
            name: field.schema() | {"required": field.required} for name, field in table.items()
        }
        return JSONResponse(
            {
                "model": self.offer.model,
                "sizes": [str(size) for size in self.offer.sizes],
                "other_sizes": self.offer.compiles_other_sizes,
                "defaults": dict(self.offer.defaults),
                "fields": fields,
                "presets": {name: dict(one) for name, one in self.offer.presets.items()},
                "plan": dict(self.offer.plan),
                "ready": self.queue.ready,
                "keys": bool(self.access.keys),
            }
        )

    async def login(self, request: Request) -> Response:
        """Exchanges a key for a cookie, which pictures and event streams of a page need."""
        given = await read_body(request)
        owner = self.access.owner_of_key(str(given.get("key", "")))
        if owner is None:
            raise ApiError(401, "This key is not valid.", code="invalid_api_key", param="key")
        response = JSONResponse({"owner": owner})
        response.set_cookie(
            COOKIE,
            self.access.session(owner),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def logout(self, request: Request) -> Response:
        """Removes the cookie."""
        response = JSONResponse({"owner": None})
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    async def page(self, request: Request) -> Response:
        """Returns the page."""
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    # Events

    async def events(self, request: Request) -> Response:
        """Streams the state of the sender's jobs: all of it at once, then after every change."""
        if self._streams >= MOST_STREAMS:
            raise ApiError(429, "Too many open event streams.", code="too_many_streams")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = self.event_texts(request.state.owner)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def event_texts(self, owner: str) -> AsyncIterator[str]:
        """Yields events until the client goes or the server stops."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        unlisten = self.queue.listen(notify)
        self._streams += 1
        self.queue.metrics.streams.inc()
        try:
            yield "retry: 2000\n\n"
            while not self.closing.is_set():
                self.queue.watch()
                changed.clear()
                yield f"event: state\ndata: {json.dumps(self.state(owner))}\n\n"
                await asyncio.sleep(EVENT_SECONDS)
                try:
                    async with asyncio.timeout(COMMENT_SECONDS / 3):
                        await changed.wait()
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            unlisten()
            self._streams -= 1
            self.queue.metrics.streams.dec()

    def state(self, owner: str) -> dict[str, Any]:
        """Returns what the page shows live: jobs that run or wait, and the latest others."""
        store = self.queue.store
        active = store.active(owner, MOST_SHOWN)
        recent, _ = store.page(owner, limit=12)
        shown_ids = {job.id for job in active}
        others = [job for job in recent if job.id not in shown_ids and not job.is_active]
        return {
            "ready": self.queue.ready and not self.queue.stopping.is_set(),
            "counts": store.counts(),
            "active": [self.view(job) for job in active],
            "recent": [self.view(job) for job in others],
        }


def printable(value: object) -> object:
    """Returns a value that may be shown in a message: a file is not."""
    if isinstance(value, list):
        return [printable(one) for one in value]
    return "(file)" if isinstance(value, bytes) else value


def new_job(owner: str, checked: CheckedRequest, remixed_from: str | None = None) -> NewJob:
    """Returns the job of a checked request."""
    return NewJob(
        owner=owner,
        size=str(checked.size),
        steps=checked.steps,
        fields=checked.fields,
        priority=checked.priority,
        remixed_from=remixed_from,
    )


def idempotency_of(request: Request, new: NewJob) -> tuple[str, str] | None:
    """Returns the idempotency key of a request and the digest of what it asks for."""
    name = request.headers.get("idempotency-key")
    if name is None:
        return None
    if not 1 <= len(name) <= LONGEST_KEY:
        message = f"Idempotency-Key: must have 1 to {LONGEST_KEY} characters."
        raise bad_request(message, param="Idempotency-Key", code="invalid_value")
    asked = json.dumps([new.fields, new.priority, new.remixed_from], sort_keys=True)
    return name, hashlib.sha256(asked.encode()).hexdigest()


def stopping() -> ApiError:
    """Returns the answer of a server that is being stopped."""
    message = "The server is being stopped. Try again in a moment."
    return ApiError(503, message, code="stopping", headers={"Retry-After": "10"})


async def read_body(request: Request) -> Mapping[str, Any]:
    """Returns the fields of a JSON object or of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
            return await read_form(request)
        if kind in ("application/json", ""):
            return read_json(await request.body())
    except ClientDisconnect:
        raise bad_request("The body is incomplete.", code="bad_request") from None
    message = f"Content-Type {shown(kind)}: send multipart/form-data or application/json."
    raise ApiError(415, message, code="unsupported_media_type")


async def read_form(request: Request) -> Mapping[str, Any]:
    """Returns the fields of a form; a file is its bytes."""
    async with request.form(
        max_files=MOST_FILES, max_fields=MOST_FIELDS, max_part_size=MOST_FIELD_BYTES
    ) as form:
        values = form_values(form.multi_items())
        return {name: await file_content(value) for name, value in values.items()}


async def file_content(value: Any) -> Any:
    """Returns the bytes of a file, those of every file of a list, or the text of a field."""
    if isinstance(value, list):
        return [await file_content(one) for one in value]
    return await value.read() if isinstance(value, UploadFile) else value


def read_json(body: bytes) -> Mapping[str, Any]:
    """Returns a JSON object; raises ApiError for anything else."""
    try:
        value = json.loads(body or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise bad_request("The body is not valid JSON.", code="bad_request") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="bad_request")
    return value


def _refuse_constant(word: str) -> float:
    raise ValueError(word)


def make_app(api: Api) -> ASGIApp:
    """Returns the application: all routes behind the guard."""
    video = "/v1/videos/{identifier}"
    routes = [
        Route("/v1/videos", api.create, methods=["POST"]),
        Route("/v1/videos", api.list_videos, methods=["GET"]),
        *(Route(f"/v1/videos/{name}", api.unsupported, methods=["POST"]) for name in UNSUPPORTED),
        Route("/v1/videos/characters/{name}", api.unsupported, methods=["GET"]),
        Route(video, api.retrieve, methods=["GET"]),
        Route(video, api.delete, methods=["DELETE"]),
        Route(f"{video}/content", api.content, methods=["GET"]),
        Route(f"{video}/cancel", api.cancel, methods=["POST"]),
        Route(f"{video}/remix", api.remix, methods=["POST"]),
        Route(f"{video}/preview", api.preview, methods=["GET"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{model:path}", api.model, methods=["GET"]),
        Route("/v1/events", api.events, methods=["GET"]),
        Route("/v1/server", api.server, methods=["GET"]),
        Route("/v1/session", api.login, methods=["POST"]),
        Route("/v1/session", api.logout, methods=["DELETE"]),
        Route("/livez", api.livez, methods=["GET"]),
        Route("/readyz", api.readyz, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
        Route("/", api.page, methods=["GET"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    handlers: Any = {
        ApiError: on_api_error,
        HTTPException: on_http_exception,
        500: on_unexpected,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, api.access, api.queue.metrics)

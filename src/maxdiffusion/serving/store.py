"""The queue on disk: jobs, their states and idempotency keys, by SQLAlchemy Core.

    queued ---claim---> in_progress ---complete---> completed
       ^                    |   \
       +------requeue-------+    +---fail---> failed (also: cancelled, lost, crashed)

Every change is committed before the caller answers. A job keeps its number when it returns to the
queue, so that it is the next one again. A deleted job is invisible at once; its row goes when
nothing works on it any more.
"""

import json
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Engine, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.engine import Connection, Row

QUEUED, IN_PROGRESS, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
ACTIVE = (QUEUED, IN_PROGRESS)
FINISHED = (COMPLETED, FAILED)
CANCELLED = "cancelled"
FILE_NAME = "jobs.sqlite"
BUSY_SECONDS = 10
MOST_PAGES = 1000  # of jobs that wait for their programs, before others
TABLES_LOCK = 0x6D617864  # any number that nothing else in the database locks

METADATA = MetaData()
JOBS = Table(
    "jobs",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(40), nullable=False, unique=True),
    Column("owner", String(200), nullable=False),
    Column("status", String(16), nullable=False),
    Column("priority", Integer, nullable=False, default=0),
    Column("size", String(40), nullable=False),
    Column("steps", Integer, nullable=False),
    Column("fields", Text, nullable=False),
    Column("remixed_from", String(40)),
    Column("created_at", Integer, nullable=False),
    Column("started_at", Integer),
    Column("completed_at", Integer),
    Column("expires_at", Integer),
    Column("progress", Integer, nullable=False, default=0),
    Column("attempts", Integer, nullable=False, default=0),
    Column("cancel_requested", Integer, nullable=False, default=0),
    Column("deleted", Integer, nullable=False, default=0),
    Column("replica", String(64)),
    Column("lease_until", Integer),
    Column("bytes", BigInteger, nullable=False, default=0),
    Column("error", Text),
    Column("timings", Text),
    Index("jobs_in_order", "status", "priority", "number"),
    Index("jobs_of_owner", "owner", "number"),
)
IDEMPOTENCY = Table(
    "idempotency",
    METADATA,
    Column("owner", String(200), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("job", String(40), nullable=False),
    Column("created_at", Integer, nullable=False),
)
IN_ORDER = (JOBS.c.priority.desc(), JOBS.c.number)
MOST_VALUES = 500  # in one list of a query


class QueueFull(Exception):
    """The queue, or the part of it that one key may use, has no room."""

    def __init__(self, limit: int, *, of_key: bool):
        super().__init__(f"{limit} jobs wait or run already")
        self.limit, self.of_key = limit, of_key


class OtherRequest(Exception):
    """An idempotency key was used for another request before."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row of the queue."""

    number: int
    id: str
    owner: str
    status: str
    priority: int
    size: str
    steps: int
    fields: Mapping[str, Any]
    remixed_from: str | None
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None
    progress: int
    attempts: int
    cancel_requested: bool
    deleted: bool
    bytes: int
    error: Mapping[str, Any] | None
    timings: Mapping[str, Any] | None

    @property
    def is_active(self) -> bool:
        """Returns whether the job waits or runs."""
        return self.status in ACTIVE


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A queued job, as far as the order of the queue depends on it."""

    id: str
    priority: int
    size: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A checked request that is to become a job."""

    owner: str
    size: str
    steps: int
    fields: Mapping[str, Any]
    priority: int = 0
    remixed_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Jobs that may wait or run: in all, and of one key."""

    queue: int
    per_key: int


AnyJob = TypeVar("AnyJob", Job, Waiting)


def new_id() -> str:
    """Returns the id of a new job."""
    return f"video_{uuid.uuid4().hex}"


def now() -> int:
    """Returns the time in seconds."""
    return int(time.time())


def open_database(url: str, folder: Path) -> Engine:
    """Returns the engine of a database url, or of the file in `folder`; tables are made."""
    if url:
        engine = sa.create_engine(url, pool_pre_ping=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(f"sqlite:///{folder / FILE_NAME}")
        sa.event.listen(engine, "connect", _use_wal)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":  # several servers may start at once
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(TABLES_LOCK)))
        METADATA.create_all(connection)
    return engine


def _use_wal(connection: Any, _: object) -> None:
    """Readers do not wait for the writer; a commit is on the disk when it returns."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_SECONDS * 1000}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


class JobStore:
    """Reads and changes the queue. Safe to use from several threads.

    `replica` is the name of this server in `claim`; a claim is lost when it is not renewed for
    `lease_seconds`, which matters only where several servers share the queue.
    """

    def __init__(self, engine: Engine, *, replica: str = "", lease_seconds: int = 60):
        self._engine = engine
        self._writer = Lock()
        self._replica = replica
        self._lease_seconds = lease_seconds
        self.shared = engine.dialect.name != "sqlite"

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._writer, self._engine.begin() as connection:
            yield connection

    # Requests

    def add(
        self, new: NewJob, limits: Limits, *, idempotency: tuple[str, str] | None = None
    ) -> tuple[Job, bool]:
        """Returns the job and whether it is new; `idempotency` is a key and the request's digest.

        Raises QueueFull, or OtherRequest if the key belongs to another request.
        """
        with self._writing() as connection:
            if idempotency is not None:
                known = self._of_key(connection, new.owner, idempotency)
                if known is not None:
                    return known, False
            self._check_limits(connection, new.owner, limits)
            identifier = new_id()
            connection.execute(
                sa.insert(JOBS).values(
                    id=identifier,
                    owner=new.owner,
                    status=QUEUED,
                    priority=new.priority,
                    size=new.size,
                    steps=new.steps,
                    fields=json.dumps(new.fields, ensure_ascii=False),
                    remixed_from=new.remixed_from,
                    created_at=now(),
                )
            )
            if idempotency is not None:
                self._keep_key(connection, new.owner, idempotency, identifier)
            return self._one(connection, JOBS.c.id == identifier), True

    def _of_key(
        self, connection: Connection, owner: str, idempotency: tuple[str, str]
    ) -> Job | None:
        name, digest = idempotency
        row = connection.execute(
            sa.select(IDEMPOTENCY).where(IDEMPOTENCY.c.owner == owner, IDEMPOTENCY.c.name == name)
        ).first()
        if row is None:
            return None
        if row.digest != digest:
            raise OtherRequest
        found = connection.execute(_visible().where(JOBS.c.id == row.job)).first()
        return None if found is None else as_job(found)

    def _keep_key(
        self, connection: Connection, owner: str, idempotency: tuple[str, str], identifier: str
    ) -> None:
        name, digest = idempotency
        connection.execute(
            sa.delete(IDEMPOTENCY).where(IDEMPOTENCY.c.owner == owner, IDEMPOTENCY.c.name == name)
        )
        connection.execute(
            sa.insert(IDEMPOTENCY).values(
                owner=owner, name=name, digest=digest, job=identifier, created_at=now()
            )
        )

    def _check_limits(self, connection: Connection, owner: str, limits: Limits) -> None:
        active = JOBS.c.status.in_(ACTIVE)
        total = sa.func.count()
        of_key = sa.func.count(sa.case((JOBS.c.owner == owner, 1)))
        everyone, own = connection.execute(sa.select(total, of_key).where(active)).one()
        if own >= limits.per_key:
            raise QueueFull(limits.per_key, of_key=True)
        if everyone >= limits.queue:
            raise QueueFull(limits.queue, of_key=False)

    def get(self, identifier: str, owner: str | None = None) -> Job | None:
        """Returns a visible job by its id; only of one owner, if given."""
        query = _visible().where(JOBS.c.id == identifier)
        if owner is not None:
            query = query.where(JOBS.c.owner == owner)
        with self._engine.connect() as connection:
            row = connection.execute(query).first()
        return None if row is None else as_job(row)

    def page(
        self, owner: str, *, limit: int, after: Job | None = None, newest_first: bool = True
    ) -> tuple[list[Job], bool]:
        """Returns up to `limit` jobs that follow `after`, and whether there are more."""
        query = _visible().where(JOBS.c.owner == owner)
        number = JOBS.c.number
        if after is not None:
            beyond = number < after.number if newest_first else number > after.number
            query = query.where(beyond)
        query = query.order_by(number.desc() if newest_first else number).limit(limit + 1)
        with self._engine.connect() as connection:
            jobs = [as_job(row) for row in connection.execute(query)]
        return jobs[:limit], len(jobs) > limit

    def active(self, owner: str, limit: int) -> list[Job]:
        """Returns the jobs of an owner that run or wait, in the order of the queue."""
        query = _visible().where(JOBS.c.owner == owner, JOBS.c.status.in_(ACTIVE))
        running = sa.case((JOBS.c.status == IN_PROGRESS, 0), else_=1)
        query = query.order_by(running, JOBS.c.priority.desc(), JOBS.c.number).limit(limit)
        with self._engine.connect() as connection:
            return [as_job(row) for row in connection.execute(query)]

    def counts(self) -> dict[str, int]:
        """Returns the number of visible jobs by status."""
        query = sa.select(JOBS.c.status, sa.func.count()).where(JOBS.c.deleted == 0)
        with self._engine.connect() as connection:
            rows = connection.execute(query.group_by("status")).all()
        found = {row[0]: int(row[1]) for row in rows}
        return {status: found.get(status, 0) for status in (*ACTIVE, *FINISHED)}

    def waiting(self) -> list[Waiting]:
        """Returns the queued jobs of all owners, in the order of the queue."""
        columns = (JOBS.c.id, JOBS.c.priority, JOBS.c.size, JOBS.c.steps)
        query = sa.select(*columns).where(JOBS.c.status == QUEUED).order_by(*IN_ORDER)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [Waiting(id=row[0], priority=row[1], size=row[2], steps=row[3]) for row in rows]

    def fields_of(self, identifiers: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Returns the fields of jobs, by id."""
        found: dict[str, Mapping[str, Any]] = {}
        columns = sa.select(JOBS.c.id, JOBS.c.fields)
        with self._engine.connect() as connection:
            for first in range(0, len(identifiers), MOST_VALUES):
                some = JOBS.c.id.in_(identifiers[first : first + MOST_VALUES])
                rows = connection.execute(columns.where(some))
                found |= {row.id: json.loads(row.fields) for row in rows}
        return found

    def cancel(self, identifier: str, owner: str) -> Job | None:
        """Ends a job that waits, asks the device loop to end one that runs; returns it."""
        mine = sa.and_(JOBS.c.id == identifier, JOBS.c.owner == owner, JOBS.c.deleted == 0)
        with self._writing() as connection:
            ended = connection.execute(
                sa.update(JOBS)
                .where(mine, JOBS.c.status == QUEUED)
                .values(**_failure(CANCELLED, "The job was cancelled before it began."))
            )
            if not ended.rowcount:
                connection.execute(
                    sa.update(JOBS)
                    .where(mine, JOBS.c.status == IN_PROGRESS)
                    .values(cancel_requested=1)
                )
            row = connection.execute(sa.select(JOBS).where(mine)).first()
        return None if row is None else as_job(row)

    def delete(self, identifier: str, owner: str | None = None) -> Job | None:
        """Hides a job and, unless it runs, removes its row; returns the job as it was."""
        mine = sa.and_(JOBS.c.id == identifier, JOBS.c.deleted == 0)
        if owner is not None:
            mine = sa.and_(mine, JOBS.c.owner == owner)
        with self._writing() as connection:
            row = connection.execute(sa.select(JOBS).where(mine)).first()
            if row is None:
                return None
            connection.execute(sa.update(JOBS).where(mine).values(deleted=1, cancel_requested=1))
            connection.execute(
                sa.delete(JOBS).where(JOBS.c.id == identifier, JOBS.c.status != IN_PROGRESS)
            )
        return as_job(row)

    # The device loop

    def claim(
        self,
        limit: int,
        *,
        alike: Callable[[Job], Hashable] = lambda job: job.size,
        held: Callable[[Job], bool] = lambda job: False,
    ) -> list[Job]:
        """Returns the next jobs that are not held, and marks them as running.

        All have the priority of the first and its value of `alike`.
        """
        with self._writing() as connection:
            query = sa.select(JOBS).where(JOBS.c.status == QUEUED).order_by(*IN_ORDER)
            if self.shared:
                query = query.with_for_update(skip_locked=True)
            chosen: list[Job] = []
            count = window_of(limit)
            for page in range(MOST_PAGES):
                rows = connection.execute(query.limit(count).offset(page * count)).all()
                free = [job for row in rows if not held(job := as_job(row))]
                chosen = batch_of(free, limit, alike) if free else []
                if chosen or len(rows) < count:
                    break
            if chosen:
                connection.execute(
                    sa.update(JOBS)
                    .where(JOBS.c.id.in_([job.id for job in chosen]))
                    .values(
                        status=IN_PROGRESS,
                        attempts=JOBS.c.attempts + 1,
                        started_at=now(),
                        replica=self._replica,
                        lease_until=now() + self._lease_seconds,
                    )
                )
        return chosen

    def renew(self, identifiers: Sequence[str]) -> set[str]:
        """Extends the claims on running jobs; returns those that are still this server's."""
        mine = self._mine(identifiers)
        with self._writing() as connection:
            connection.execute(
                sa.update(JOBS).where(mine).values(lease_until=now() + self._lease_seconds)
            )
            return {row.id for row in connection.execute(sa.select(JOBS.c.id).where(mine))}

    def note_progress(self, identifiers: Sequence[str], progress: int) -> None:
        """Stores the progress of running jobs, for other servers and for restarts."""
        with self._writing() as connection:
            connection.execute(
                sa.update(JOBS).where(self._mine(identifiers)).values(progress=progress)
            )

    def to_cancel(self, identifiers: Sequence[str]) -> set[str]:
        """Returns which of the running jobs were cancelled or deleted."""
        query = sa.select(JOBS.c.id).where(JOBS.c.id.in_(identifiers), JOBS.c.cancel_requested == 1)
        with self._engine.connect() as connection:
            return {row.id for row in connection.execute(query)}

    def complete(
        self, identifier: str, *, size: int, timings: Mapping[str, Any], expires_at: int | None
    ) -> bool:
        """Marks a job as completed; returns False if it was deleted or is not this server's."""
        return self._finish(
            identifier,
            status=COMPLETED,
            progress=100,
            completed_at=now(),
            expires_at=expires_at,
            bytes=size,
            timings=json.dumps(timings),
            cancel_requested=0,
        )

    def fail(self, identifier: str, code: str, message: str, *, expires_at: int | None) -> bool:
        """Marks a job as failed; returns False if it was deleted or is not this server's."""
        return self._finish(identifier, **_failure(code, message), expires_at=expires_at)

    def _finish(self, identifier: str, **values: Any) -> bool:
        mine = self._mine([identifier])
        with self._writing() as connection:
            connection.execute(sa.delete(JOBS).where(mine, JOBS.c.deleted == 1))
            done = connection.execute(sa.update(JOBS).where(mine).values(**values))
            return bool(done.rowcount)

    def requeue(self, identifiers: Sequence[str]) -> None:
        """Returns running jobs to the queue, as if they had not begun."""
        with self._writing() as connection:
            connection.execute(
                sa.update(JOBS)
                .where(self._mine(identifiers))
                .values(status=QUEUED, attempts=JOBS.c.attempts - 1, replica=None, lease_until=None)
            )

    def recover(self, *, attempts: int) -> list[Job]:
        """Returns abandoned jobs to the queue: after a crash, or when another server is gone.

        A job that was begun `attempts` times has failed. Removes rows that were deleted while they
        ran. Returns the jobs that are queued again.
        """
        abandoned = JOBS.c.status == IN_PROGRESS
        if self.shared:
            abandoned = sa.and_(abandoned, JOBS.c.lease_until < now())
        crashed = f"The server ended {attempts} times while it made this video."
        with self._writing() as connection:
            connection.execute(sa.delete(JOBS).where(abandoned, JOBS.c.deleted == 1))
            connection.execute(
                sa.update(JOBS)
                .where(abandoned, JOBS.c.cancel_requested == 1)
                .values(**_failure(CANCELLED, "The job was cancelled."))
            )
            connection.execute(
                sa.update(JOBS)
                .where(abandoned, JOBS.c.attempts >= attempts)
                .values(**_failure("crashed", crashed))
            )
            found = [as_job(row) for row in connection.execute(sa.select(JOBS).where(abandoned))]
            connection.execute(
                sa.update(JOBS)
                .where(abandoned)
                .values(status=QUEUED, progress=0, replica=None, lease_until=None)
            )
        return found

    # Retention

    def expired(self, at: int) -> list[Job]:
        """Returns finished jobs whose time is over."""
        query = _visible().where(JOBS.c.status.in_(FINISHED), JOBS.c.expires_at <= at)
        with self._engine.connect() as connection:
            return [as_job(row) for row in connection.execute(query)]

    def completed(self) -> list[Job]:
        """Returns completed jobs, oldest first."""
        query = _visible().where(JOBS.c.status == COMPLETED).order_by(JOBS.c.number)
        with self._engine.connect() as connection:
            return [as_job(row) for row in connection.execute(query)]

    def unfinished(self) -> list[Job]:
        """Returns all jobs that wait or run, of all owners."""
        query = sa.select(JOBS).where(JOBS.c.status.in_(ACTIVE))
        with self._engine.connect() as connection:
            return [as_job(row) for row in connection.execute(query)]

    def all_fields(self) -> list[Mapping[str, Any]]:
        """Returns the fields of all jobs that have a row."""
        with self._engine.connect() as connection:
            return [json.loads(row.fields) for row in connection.execute(sa.select(JOBS.c.fields))]

    def lose(self, identifiers: Sequence[str]) -> None:
        """Marks completed jobs whose files are gone as failed."""
        with self._writing() as connection:
            connection.execute(
                sa.update(JOBS)
                .where(JOBS.c.id.in_(identifiers), JOBS.c.status == COMPLETED)
                .values(**_failure("lost", "The file of this video is gone."))
            )

    def forget_keys(self, before: int) -> None:
        """Removes idempotency keys that are older than a time."""
        with self._writing() as connection:
            connection.execute(sa.delete(IDEMPOTENCY).where(IDEMPOTENCY.c.created_at < before))

    def _mine(self, identifiers: Sequence[str]) -> Any:
        return sa.and_(
            JOBS.c.id.in_(identifiers),
            JOBS.c.status == IN_PROGRESS,
            JOBS.c.replica == self._replica,
        )

    def _one(self, connection: Connection, condition: Any) -> Job:
        return as_job(connection.execute(sa.select(JOBS).where(condition)).one())


def _visible() -> Any:
    return sa.select(JOBS).where(JOBS.c.deleted == 0)


def _failure(code: str, message: str) -> dict[str, Any]:
    error = json.dumps({"code": code, "message": message})
    return {"status": FAILED, "error": error, "completed_at": now(), "cancel_requested": 0}


def window_of(limit: int) -> int:
    """Returns how many jobs are looked at for a batch of up to `limit`."""
    return max(limit * 8, 1)


def batch_of(
    window: Sequence[AnyJob], limit: int, alike: Callable[[AnyJob], Hashable]
) -> list[AnyJob]:
    """Returns the first job and those after it that can be made in the same batch."""

    def key(job: AnyJob) -> Hashable:
        return job.priority, alike(job)

    first = key(window[0])
    return [job for job in window if key(job) == first][:limit]


def as_job(row: Row[Any]) -> Job:
    """Returns the job of a row."""
    values = {
        name: value for name, value in row._mapping.items() if name in Job.__dataclass_fields__
    }
    for name in ("fields", "error", "timings"):
        values[name] = None if values[name] is None else json.loads(values[name])
    return Job(
        **values | {"cancel_requested": bool(row.cancel_requested), "deleted": bool(row.deleted)}
    )

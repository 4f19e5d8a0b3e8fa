"""The queue on disk: order, claims, limits, idempotency, recovery, retention."""

import threading

import pytest

from maxdiffusion.serving.store import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    JobStore,
    Limits,
    NewJob,
    OtherRequest,
    QueueFull,
    now,
    open_database,
)

LIMITS = Limits(queue=2000, per_key=2000)


@pytest.fixture
def store(tmp_path):
    opened = JobStore(open_database("", tmp_path), replica="one")
    yield opened
    opened.close()


def new(owner="anna", **values):
    fields = {"prompt": "x", **values.pop("fields", {})}
    return NewJob(
        owner=owner, size=values.pop("size", "64x64x9"), steps=20, fields=fields, **values
    )


def add(store, **values):
    return store.add(new(**values), LIMITS)[0]


def test_jobs_run_in_order_of_priority_and_then_of_arrival(store):
    first, second, urgent = add(store), add(store), add(store, priority=5)
    claimed = [store.claim(1)[0].id for _ in range(3)]
    assert claimed == [urgent.id, first.id, second.id]
    assert store.claim(1) == []


def test_a_batch_has_one_size_and_the_same_settings(store):
    first = add(store, fields={"flow_shift": 3.0})
    add(store, size="96x64x9", fields={"flow_shift": 3.0})
    add(store, fields={"flow_shift": 5.0})
    fourth = add(store, fields={"flow_shift": 3.0})
    batch = store.claim(4, alike=lambda job: (job.size, job.fields["flow_shift"]))
    assert [job.id for job in batch] == [first.id, fourth.id]


def test_jobs_that_are_held_stay_and_others_pass_them(store):
    held = [add(store, size="96x64x9") for _ in range(20)]
    free = add(store)
    seen = store.claim(1, held=lambda job: job.size == "96x64x9")
    assert [job.id for job in seen] == [free.id]
    assert store.claim(1, held=lambda job: True) == []
    assert store.claim(1)[0].id == held[0].id


def test_limits_hold_for_all_and_for_one_key(store):
    limits = Limits(queue=3, per_key=2)
    for _ in range(2):
        store.add(new(), limits)
    with pytest.raises(QueueFull) as raised:
        store.add(new(), limits)
    assert raised.value.of_key
    store.add(new(owner="ben"), limits)
    with pytest.raises(QueueFull) as raised:
        store.add(new(owner="carl"), limits)
    assert not raised.value.of_key


def test_an_idempotency_key_makes_one_job(store):
    job, is_new = store.add(new(), LIMITS, idempotency=("k", "digest"))
    again, second_is_new = store.add(new(), LIMITS, idempotency=("k", "digest"))
    assert (is_new, second_is_new, again.id) == (True, False, job.id)
    with pytest.raises(OtherRequest):
        store.add(new(), LIMITS, idempotency=("k", "other"))
    other_owner, is_new = store.add(new(owner="ben"), LIMITS, idempotency=("k", "other"))
    assert is_new
    assert other_owner.id != job.id
    store.delete(job.id)
    fresh, is_new = store.add(new(), LIMITS, idempotency=("k", "digest"))
    assert is_new
    assert fresh.id != job.id


def test_a_claim_survives_only_until_the_next_start(store, tmp_path):
    job, waiting = add(store), add(store)
    assert store.claim(1)[0].id == job.id
    second = JobStore(open_database("", tmp_path), replica="two")
    assert [found.id for found in second.recover(attempts=3)] == [job.id]
    assert second.get(job.id).status == QUEUED
    # The one that was running is the next one again.
    assert [second.claim(1)[0].id for _ in range(2)] == [job.id, waiting.id]
    # The dead server cannot finish what is not its own any more.
    assert not store.complete(job.id, size=1, timings={}, expires_at=None)
    assert second.complete(job.id, size=1, timings={}, expires_at=None)
    second.close()


def test_a_job_that_ends_the_server_again_and_again_has_failed(store):
    job = add(store)
    for _ in range(2):
        store.claim(1)
        store.recover(attempts=3)
    store.claim(1)
    assert store.recover(attempts=3) == []
    assert store.get(job.id).status == FAILED
    assert store.get(job.id).error["code"] == "crashed"


def test_a_stopped_server_does_not_count_as_an_attempt(store):
    job = add(store)
    for _ in range(5):
        store.claim(1)
        store.requeue([job.id])
    assert store.get(job.id).attempts == 0


def test_cancel_and_delete_in_every_state(store):
    waiting, running, done = add(store), add(store, priority=1), add(store, priority=2)
    store.claim(1)
    store.complete(done.id, size=1, timings={}, expires_at=None)
    store.claim(1)
    assert store.cancel(waiting.id, "ben") is None
    assert store.cancel(waiting.id, "anna").error["code"] == "cancelled"
    assert store.cancel(running.id, "anna").status == IN_PROGRESS
    assert store.to_cancel([running.id]) == {running.id}
    assert store.cancel(done.id, "anna").status == COMPLETED
    assert store.delete(running.id, "ben") is None
    assert store.delete(running.id, "anna").id == running.id
    assert store.get(running.id) is None
    assert store.delete(running.id, "anna") is None
    assert not store.complete(running.id, size=1, timings={}, expires_at=None)
    assert store.counts() == {QUEUED: 0, IN_PROGRESS: 0, COMPLETED: 1, FAILED: 1}


@pytest.mark.parametrize("state", ["cancelled", "deleted"])
def test_what_was_cancelled_before_a_crash_does_not_run_again(store, state):
    job = add(store)
    store.claim(1)
    (store.cancel if state == "cancelled" else store.delete)(job.id, "anna")
    assert store.recover(attempts=3) == []
    assert store.claim(1) == []
    found = store.get(job.id)
    assert (found is None) == (state == "deleted")
    assert found is None or found.error["code"] == "cancelled"


def test_two_deletes_at_once_delete_once(store):
    jobs = [add(store) for _ in range(20)]
    results = []

    def delete():
        results.extend(store.delete(job.id, "anna") is not None for job in jobs)

    threads = [threading.Thread(target=delete) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) == 20


def test_pages_in_both_orders(store):
    jobs = [add(store) for _ in range(5)]
    page, more = store.page("anna", limit=2)
    assert ([job.id for job in page], more) == ([jobs[4].id, jobs[3].id], True)
    page, more = store.page("anna", limit=3, after=page[-1])
    assert ([job.id for job in page], more) == ([job.id for job in jobs[2::-1]], False)
    page, more = store.page("anna", limit=5, newest_first=False)
    assert ([job.id for job in page], more) == ([job.id for job in jobs], False)
    assert store.page("ben", limit=5) == ([], False)


def test_a_thousand_jobs_wait(store):
    jobs = [add(store) for _ in range(1000)]
    assert store.counts()[QUEUED] == 1000
    assert [job.id for job in store.waiting()] == [job.id for job in jobs]
    assert len(store.claim(8)) == 8


def test_expiry(store):
    old, young = add(store), add(store)
    store.claim(2)
    store.complete(old.id, size=1, timings={}, expires_at=now() - 1)
    store.complete(young.id, size=1, timings={}, expires_at=now() + 100)
    assert [job.id for job in store.expired(now())] == [old.id]
    store.lose([young.id])
    assert store.get(young.id).error["code"] == "lost"

"""Three servers share one PostgreSQL queue; one is killed, nothing is lost or made twice."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from maxdiffusion.serving.store import JobStore, Limits, NewJob, open_database

pytestmark = pytest.mark.slow
REQUIRED = "CI"  # set by continuous integration
ROOT = Path(__file__).parents[2]
JOBS = 24
FIELDS = {"prompt": "x", "width": 64, "height": 64, "num_frames": 9, "fps": 8, "seed": 0}


def postgres_folder() -> Path | None:
    """Returns the programs of PostgreSQL, which Debian keeps out of the path."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


@pytest.fixture(scope="module")
def url():
    """A database of its own, on a socket in a temporary folder."""
    programs = postgres_folder()
    if programs is None:
        assert REQUIRED not in os.environ, "apt-get install postgresql"
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    folder = tempfile.mkdtemp(prefix="postgres_")
    # PostgreSQL refuses to run as root.
    user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
    if user:
        shutil.chown(folder, "postgres", "postgres")
    run = {"check": True, "stdout": subprocess.DEVNULL, "cwd": folder, **user}
    subprocess.run(
        [programs / "initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "anna", "-N"], **run
    )
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    command = [programs / "pg_ctl", "-D", f"{folder}/data", "-l", f"{folder}/log"]
    subprocess.run([*command, "-w", "-o", options, "start"], **run)
    yield f"postgresql+psycopg://anna@/postgres?host={folder}"
    subprocess.run([*command, "-m", "immediate", "stop"], **run)
    shutil.rmtree(folder, ignore_errors=True)


def start_replicas(folder, url, count):
    """Returns running servers, once each of them answers."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.serving.replica", str(folder), f"server{number}", url],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for process in processes:
        while "http" not in process.stdout.readline():
            assert process.poll() is None
    return processes


def test_a_killed_replica_gives_its_job_back(tmp_path, url):
    store = JobStore(open_database(url, tmp_path), replica="observer")
    limits = Limits(queue=100, per_key=100)
    jobs = [
        store.add(NewJob(owner="local", size="64x64x9", steps=20, fields=FIELDS), limits)[0]
        for _ in range(JOBS)
    ]
    processes = start_replicas(tmp_path, url, 3)
    try:
        while store.counts()["completed"] < 3:
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGKILL)
        ends = time.monotonic() + 60
        while store.counts()["completed"] < JOBS:
            assert time.monotonic() < ends, store.counts()
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert store.counts() == {"queued": 0, "in_progress": 0, "completed": JOBS, "failed": 0}
    found = [store.get(job.id) for job in jobs]
    assert all((tmp_path / "videos" / f"{job.id}.mp4").exists() for job in found)
    # Only what the killed server had begun was begun a second time.
    attempts = Counter(job.attempts for job in found)
    assert attempts[1] >= JOBS - 1
    assert set(attempts) <= {1, 2}
    store.close()

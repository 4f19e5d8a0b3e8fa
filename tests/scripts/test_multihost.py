"""The launchers of scripts/multihost: valid manifests, and the command that each really runs."""

import copy
import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from jax._src.clusters.cloud_tpu_cluster import coordinator_port

from maxdiffusion.config.load import read_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "multihost"
SCHEMA = json.loads((Path(__file__).parent / "jobset.schema.json").read_text())
MANIFEST = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
RUN = ("configs/wan_tiny.yml", "prompt=a red circle; 'quoted'", "seed=7")


def pod_of(manifest):
    (job,) = manifest["spec"]["replicatedJobs"]
    return job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


def test_the_manifest_keeps_to_the_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MANIFEST, SCHEMA)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job, pod: pod.update(restartPolicies="Never"),
        lambda job, pod: job.update(parallelism="2"),
        lambda job, pod: pod["securityContext"].update(runAsNonRoot=False),
        lambda job, pod: pod["nodeSelector"].pop("cloud.google.com/gke-tpu-topology"),
        lambda job, pod: pod["containers"][0]["env"].append({"name": "A", "value": 1}),
        lambda job, pod: pod["containers"][0]["resources"]["limits"].pop("google.com/tpu"),
    ],
)
def test_the_schema_finds_slips(spoil):
    manifest = copy.deepcopy(MANIFEST)
    spoil(*pod_of(manifest))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_hosts_and_chips_of_the_manifest_make_up_its_slice():
    job, pod = pod_of(MANIFEST)
    sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"]
    assert job["parallelism"] * chips == math.prod(int(side) for side in sides)


def test_the_manifest_runs_what_the_config_knows():
    _, pod = pod_of(MANIFEST)
    (container,) = pod["containers"]
    config, *overrides = container["args"]
    parsed = read_config([str(ROOT / config), *overrides])
    assert not parsed.problems
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/bucket"}
    assert parsed.config.output_dir.startswith("/bucket/")
    assert {volume["name"] for volume in pod["volumes"]} == {"bucket"}
    # Sixteen devices of a 2x2x2 slice, two on a chip.
    assert parsed.config.ici_data_parallelism * parsed.config.ici_context_parallelism == 16


def test_the_manifest_opens_the_port_where_jax_meets():
    _, pod = pod_of(MANIFEST)
    (container,) = pod["containers"]
    assert int(coordinator_port) in [port["containerPort"] for port in container["ports"]]


def test_the_image_runs_as_the_user_of_the_manifest():
    _, pod = pod_of(MANIFEST)
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert pod["securityContext"]["runAsUser"] == int(user)


def run_script(tmp_path: Path, script: str, *arguments: str, **environment: str):
    """Runs a launcher with programs in its path that only write down their arguments."""
    for name in ("xpk", "gcloud", "srun"):
        program = tmp_path / name
        program.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$0" "$@" >>"$SAID"\n')
        program.chmod(0o755)
    said = tmp_path / "said"
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", str(FOLDER / script), *arguments],
        env={**os.environ, "PATH": path, "SAID": str(said), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result, said.read_text().splitlines() if said.exists() else []


def test_xpk_gets_the_whole_command(tmp_path):
    result, said = run_script(
        tmp_path,
        "xpk.sh",
        *RUN,
        CLUSTER="c",
        PROJECT="p",
        ZONE="z",
        TPU_TYPE="tpu7x-16",
        IMAGE="i:tpu",
        SLICES="2",
    )
    assert result.returncode == 0, result.stderr
    assert said[1:3] == ["workload", "create"]
    options = dict(option.removeprefix("--").split("=", 1) for option in said[3:])
    assert options["tpu-type"] == "tpu7x-16"
    assert options["num-slices"] == "2"
    assert shlex.split(options["command"]) == ["python", "-m", "maxdiffusion.generate_wan", *RUN]


def test_gcloud_runs_on_every_worker(tmp_path):
    result, said = run_script(tmp_path, "gcloud.sh", "run", *RUN, TPU="t", ZONE="z")
    assert result.returncode == 0, result.stderr
    assert said[1:6] == ["compute", "tpus", "tpu-vm", "ssh", "t"]
    assert "--worker=all" in said
    (command,) = [word for word in said if word.startswith("--command=")]
    words = shlex.split(command.removeprefix("--command="))
    assert words[:3] == ["cd", "maxdiffusion", "&&"]
    assert words[3:] == [".venv/bin/python", "-m", "maxdiffusion.generate_wan", *RUN]


def test_gcloud_benches_on_every_worker(tmp_path):
    _, said = run_script(
        tmp_path, "gcloud.sh", "bench", RUN[0], "--batches", "1,2", TPU="t", ZONE="z"
    )
    (command,) = [word for word in said if word.startswith("--command=")]
    words = shlex.split(command.removeprefix("--command="))
    assert words[3:] == [
        ".venv/bin/python",
        "scripts/bench_attention.py",
        RUN[0],
        "--batches",
        "1,2",
    ]


def test_slurm_starts_one_process_on_each_node(tmp_path):
    text = (FOLDER / "slurm.sbatch").read_text()
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert settings["ntasks-per-node"] == "1"
    result, said = run_script(tmp_path, "slurm.sbatch", *RUN, PROGRAM="maxdiffusion.train_wan")
    assert result.returncode == 0, result.stderr
    assert said[1] == "--kill-on-bad-exit=1"
    assert said[3:] == ["python", "-m", "maxdiffusion.train_wan", *RUN]


@pytest.mark.parametrize("script", ["xpk.sh", "gcloud.sh", "slurm.sbatch"])
def test_without_arguments_a_launcher_says_how_it_is_used(tmp_path, script):
    result, said = run_script(tmp_path, script)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
    assert said == []

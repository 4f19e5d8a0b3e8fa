"""The manifests of the server say what the server does."""

from pathlib import Path

import pytest
import yaml

from maxdiffusion.config.load import parse_config
from maxdiffusion.serving.metrics import Metrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts/serving"


def objects(name):
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def containers():
    group = objects("replicas.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [
        objects("gke.yaml")["StatefulSet"]["spec"]["template"]["spec"],
        group["leaderTemplate"]["spec"],
        group["workerTemplate"]["spec"],
    ]


@pytest.mark.parametrize("pod", containers())
def test_the_command_loads(pod):
    (container,) = pod["containers"]
    file, *overrides = container["args"]
    config = parse_config(str(ROOT / file), overrides).checked()
    assert container["command"] == ["python", "-m", "maxdiffusion.serve_wan"]
    assert config.serve_stop_seconds < pod["terminationGracePeriodSeconds"]
    assert container["ports"] == [{"containerPort": config.serve_port}]
    assert pod["securityContext"]["runAsNonRoot"]
    assert "MAXDIFFUSION_API_KEYS" in [one["name"] for one in container["env"]]


def test_probes_ask_for_existing_routes():
    for pod in containers()[:2]:
        (container,) = pod["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_autoscaling_reads_a_metric_that_exists():
    (trigger,) = objects("replicas.yaml")["ScaledObject"]["spec"]["triggers"]
    text = Metrics(lambda: {"queued": 3}).text().decode()
    assert 'maxdiffusion_jobs{status="queued"} 3.0' in text
    assert 'maxdiffusion_jobs{status="queued"}' in trigger["metadata"]["query"]

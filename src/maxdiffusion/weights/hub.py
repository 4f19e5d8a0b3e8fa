"""Models on the Hugging Face hub: only the files that a run needs are downloaded."""

from collections.abc import Sequence
from pathlib import Path

from maxdiffusion.runtime.problems import Problem

HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
KINDS = ("*.json", "*.safetensors", "*.model", "*.txt")


def download(
    repository: str, components: Sequence[str] | None, *, name: str
) -> tuple[Path | None, tuple[Problem, ...]]:
    """The local copy of a repository, or the problem (of the setting `name`) that kept it away."""
    # Slow to import, and local folders do without it.
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(repository, allow_patterns=patterns(components))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        rule = "is neither a folder here nor a hub repository that you may read"
        remedy = "Check the spelling; for a gated model accept its terms and log in (hf auth login)"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        rule = "is not a folder here, not in the hub's cache, and the hub cannot be reached"
        remedy = "Unset HF_HUB_OFFLINE or mend the network, or give the path of a local folder"
    except Exception as error:  # the client lets every error of its network library through
        rule = f"could not be downloaded ({type(error).__name__}: {error})"
        remedy = "Try again, or download it by hand and give the path of the folder"
    else:
        return Path(found), ()
    return None, (Problem(name=name, value=repository, rule=rule, remedy=remedy),)


def patterns(components: Sequence[str] | None) -> list[str]:
    """The files to ask for; those of all components when they are not named."""
    if components is None:
        return list(KINDS)
    return ["model_index.json", *(f"{part}/{kind}" for part in components for kind in KINDS)]

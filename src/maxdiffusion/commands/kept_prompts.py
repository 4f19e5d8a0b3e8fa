"""`prompt_embeddings_cache_dir`: a folder of prompt embeddings, for runs without a text encoder."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from maxdiffusion.commands.preparation import Preparation
from maxdiffusion.pipelines.kept_prompts import KeptPrompts, PromptFolder
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.coordination import from_first
from maxdiffusion.runtime.places import place
from maxdiffusion.weights.folder import CONFIG, TOKENIZER, ModelFolder
from maxdiffusion.weights.manifest import SourceFile, hash_files


def kept_prompts(
    preparation: Preparation,
    tokenizer: PromptTokenizer,
    prompts: Sequence[str],
    say: Callable[[str], None],
) -> KeptPrompts | None:
    """What the folder of a config has of the prompts of a run, and says so; None without one."""
    config, workshop, shape = preparation.config, preparation.workshop, preparation.shape
    if not config.prompt_embeddings_cache_dir:
        return None
    folder = place(config.prompt_embeddings_cache_dir)
    precision = workshop.settings.precision
    kept = PromptFolder(
        folder=folder,
        made_with={
            "text_encoder": from_first(
                "text encoder", lambda: encoder_digest(preparation.folder, folder)
            ),
            "dtype": str(precision.text_encoder),
            "matmul": precision.matmul,
        },
        width=workshop.spec.text_encoder.width,
        say=say,
    )
    texts = [*prompts, *([config.negative_prompt] if shape.guidance.copies == 2 else [])]
    length = shape.text_length
    found = kept.look([tokenizer.ids(text, length) for text in texts], length)
    say(found.describe())
    return found


def encoder_digest(model: ModelFolder, folder: Path) -> str:
    """A hash of the text encoder and the tokenizer.

    It is of all they contain. Hashes of files are kept in `folder`: one that has the size and the
    time of change that it had is not read again.
    """
    files = [
        model.path("text_encoder", CONFIG),
        *model.weights["text_encoder"].files,
        model.path("tokenizer", TOKENIZER),
    ]
    where = hashlib.sha256(str(model.root.absolute()).encode()).hexdigest()[:24]
    notes = folder / f"text_encoder-{where}.json"
    known = _noted(notes)
    hashed = hash_files(files, known)
    if hashed != known:
        with replacing(notes) as unfinished:
            unfinished.write_text(json.dumps([asdict(file) for file in hashed], indent=2) + "\n")
    contents = [(file.name, file.sha256) for file in hashed]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _noted(notes: Path) -> tuple[SourceFile, ...]:
    """Hashes from an earlier run; none if there are none that can be read."""
    try:
        return tuple(SourceFile(**fields) for fields in json.loads(notes.read_bytes()))
    except (OSError, ValueError, TypeError):
        return ()

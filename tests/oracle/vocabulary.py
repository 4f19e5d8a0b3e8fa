"""A small unigram tokenizer in T5 form, counted from a few English sentences."""

import math
from collections import Counter
from pathlib import Path

from transformers import T5Tokenizer

Pieces = list[tuple[str, float]]
WORD_START = "▁"
SPECIAL_PIECES: Pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]

SENTENCES = """
A red fox runs through deep snow while the morning sun rises behind the hills.
Two children fly a paper kite on a windy beach, and waves roll over the sand.
The camera moves slowly along a narrow street; neon signs shine on the wet stones.
An old sailor repairs a net beside a wooden boat in a quiet harbour at night.
A glass of water falls from the table, breaks and spills over the kitchen floor.
Close shot of a hummingbird drinking from a yellow flower, slow motion, soft light.
A small robot walks across the moon and looks back at the blue earth.
The dog is stirring a cake with a spoon, the cat is reading a book in the garden.
blurred, static, low quality, worst quality, ugly, watermark, subtitles, extra fingers.
""".strip().splitlines()
ASCII = "".join(map(chr, range(33, 127)))


def unigram_pieces(
    sentences: list[str] = SENTENCES, *, words: int = 160, pairs: int = 80
) -> Pieces:
    """Returns frequent words, frequent letter pairs and every letter, with their log frequency."""
    counts = Counter(WORD_START + word for line in sentences for word in line.split())
    joints = Counter(
        word[at : at + 2] for word in counts.elements() for at in range(1, len(word) - 1)
    )
    letters = Counter("".join(counts.elements()))
    for letter in ASCII + WORD_START:
        letters[letter] += 1
    chosen = Counter(dict(counts.most_common(words))) + Counter(dict(joints.most_common(pairs)))
    chosen += letters
    total = sum(chosen.values())
    # Pieces are ordered by count, then by spelling, so that the same text gives the same ids.
    ordered = sorted(chosen.items(), key=lambda item: (-item[1], item[0]))
    return [(piece, math.log(count / total)) for piece, count in ordered]


def write_tokenizer(folder: Path, pieces: Pieces) -> T5Tokenizer:
    """Saves a T5 tokenizer folder (pad 0, eos 1, unk 2) and returns the tokenizer."""
    tokenizer = T5Tokenizer(
        vocab=SPECIAL_PIECES + pieces,
        extra_ids=0,
        model_max_length=512,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer

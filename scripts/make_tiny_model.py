#!/usr/bin/env python
"""Writes the tiny WAN model that ships in the package: src/maxdiffusion/assets/wan_tiny.

    python scripts/make_tiny_model.py [folder]      # needs the parity extra; same files every time

A diffusers folder with two experts, as WAN 2.2 has, small enough to generate a video on a CPU in
seconds. Its weights are random; the VAE's kernels are smooth over space, so that frames show soft
blobs of colour instead of noise.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import oracle  # noqa: E402, F401  (sets the environment that torch and transformers read)
import torch  # noqa: E402
from oracle.tiny_checkpoints import (  # noqa: E402
    TextSize,
    TransformerSize,
    VaeSize,
    wan22_t2v,
    write_checkpoint,
)
from oracle.vocabulary import SENTENCES, unigram_pieces  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

FOLDER = ROOT / "src" / "maxdiffusion" / "assets" / "wan_tiny"
SEED = 2022
SIZES = wan22_t2v(
    seed=SEED,
    transformer=TransformerSize(heads=4, head_dim=32, layers=4, ffn=256),
    vae=VaeSize(base=16, multipliers=(1, 2, 2, 2), res_blocks=1),
    text=TextSize(width=64, heads=4, head_dim=16, layers=2, ffn=128),
    dtype=torch.bfloat16,
)
MORE_SENTENCES = """
A cat and a dog baking a cake together in a kitchen, sunlight streaming through the window.
Two cats in comfy boxing gear and bright gloves fight on a stage under a spotlight.
A woman in a red dress walks down a street in the rain at night, city lights behind her.
A man with a white beard smiles at the camera, close up portrait, cinematic, shallow focus.
An astronaut rides a horse over green grass under a purple sky with many stars.
Drone view of a river in a forest, autumn leaves, fog between the trees, early morning.
A train crosses a bridge over the sea, birds fly past, white clouds move across the sky.
Fish swim around a coral reef, bubbles rise to the surface, clear blue water, underwater.
A car drives along a desert road at sunset, dust behind it, mountains far away, golden hour.
Boiling soup in a pot, steam, a hand adds salt and pepper, warm kitchen light, macro.
Fireworks over a lake, people watch from a boat, slow camera pan from left to right.
A girl plays the piano in an empty hall, black and white film, grain, soft focus.
Waves crash on rocks near a lighthouse during a storm, dark clouds, lightning, high detail.
A panda eats bamboo, snow falls, smooth motion, natural colours, realistic, best quality.
A butterfly lands on a pink flower and opens its wings, green background, time lapse.
Flames and smoke rise from a camp fire, sparks float up into the black night.
bright tones, overexposed, blurred details, painting, image, still picture, overall gray,
low resolution, compression artifacts, incomplete, badly drawn hands, badly drawn face,
deformed, disfigured, messy background, three legs, many people, walking backwards, text, logo.
one two three four five six seven eight nine ten old new young big small long short first last
""".strip().splitlines()


def smooth_kernels(file: Path) -> None:
    """Turns the 3x3 kernels in a VAE's file into random mixtures of one soft blur."""
    taps = torch.tensor([1.0, 2.0, 1.0]) / 4
    blur = torch.outer(taps, taps)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim >= 4 and tuple(tensor.shape[-2:]) == (3, 3):
            # The last kernel is halved again, which keeps most of the picture inside 0..1.
            scale = 0.5 if name == "decoder.conv_out.weight" else 1.0
            mixture = scale * tensor.float().sum((-2, -1), keepdim=True)
            tensors[name] = (mixture * blur).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    """Writes the folder and prints its size."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    pieces = unigram_pieces(SENTENCES + MORE_SENTENCES, words=400, pairs=200)
    write_checkpoint(folder, SIZES, pieces)
    smooth_kernels(folder / "vae" / "diffusion_pytorch_model.safetensors")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

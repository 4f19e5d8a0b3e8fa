"""Conditioning inputs of the WAN family as diffusers 0.42 computes them, in numpy on the host.

    images.py    images and frames to height x width; CLIP's pixels; first and last frame of I2V
    vace.py      control video, mask and reference images of VACE
    animate.py   character, pose, face, background and mask of Animate, segment by segment

Arrays are channels-last. Pixels of a model are float32 in -1..1. `tests/parity` compares every
function with diffusers, bit for bit where it says so.
"""

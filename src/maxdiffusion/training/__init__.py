"""Training: data, losses, steps, checkpoints and the loop around them."""

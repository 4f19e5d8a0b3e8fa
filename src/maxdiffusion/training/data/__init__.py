"""Training data: clips, caches of latents and text, batches in a fixed order."""

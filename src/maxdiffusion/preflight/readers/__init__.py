"""Readers of what the TPU compiler writes: scheduled HLO, kernel bundles, collectives."""

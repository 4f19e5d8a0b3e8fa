"""Watching a run: evaluation on held-out clips, warnings of divergence, report with charts."""

"""HTTP server of a loaded model: `/v1/videos`, a queue that survives restarts, and a page.

Only `worker.py`, which runs the device loop, imports jax.
"""

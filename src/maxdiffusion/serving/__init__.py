"""HTTP server of a loaded model: `/v1/videos`, a queue that survives restarts, and a page.

Nothing here imports jax except `worker.py`, which runs the device loop.
"""

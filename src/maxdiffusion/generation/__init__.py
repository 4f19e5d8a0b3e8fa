"""One generation job: resolve, load, denoise, decode, write, resume."""

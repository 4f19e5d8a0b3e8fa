"""The device loop of the server: the one part of it that uses jax."""

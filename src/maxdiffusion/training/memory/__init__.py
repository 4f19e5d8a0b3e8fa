"""Memory of a training: formats of the optimizer state, and where it is kept."""

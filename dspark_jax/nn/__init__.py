"""Layers as pure functions. Choices that depend on the backend live in this room and nowhere else."""

"""Kernels behind operations of dspark_jax. One folder an operation: a reference, backends, and specs for its tests.

Imports JAX only, never dspark_jax.
"""

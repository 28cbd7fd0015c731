"""The HTTP server: an OpenAI-compatible front of the engine (``python -m dspark_jax.serve``)."""

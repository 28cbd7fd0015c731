"""Decoder configurations in and out of the Hugging Face spelling (``config.json``).

Everything that is wrong with a config is collected and raised as one ValueError that names the file. What a
family leaves out or fixes is a row of ``FAMILIES``; a new family is a new row.
"""

from __future__ import annotations

from dspark_jax.config_io.families import FAMILIES, Family
from dspark_jax.config_io.read import decoder_config_from_hf
from dspark_jax.config_io.write import decoder_config_to_hf

__all__ = ["FAMILIES", "Family", "decoder_config_from_hf", "decoder_config_to_hf"]

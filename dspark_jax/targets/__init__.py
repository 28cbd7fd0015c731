"""Target models: decoder-only transformers whose hidden states feed a drafter."""

from dspark_jax.targets.decoder import decoder_specs, forward, unembed
from dspark_jax.targets.fingerprint import weights_digest
from dspark_jax.targets.model import Target, stop_ids

__all__ = ["Target", "decoder_specs", "forward", "stop_ids", "unembed", "weights_digest"]

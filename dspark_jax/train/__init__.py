"""Training of block drafters: loss, packed forward, step and loop."""

"""What tests and experiments need to drive decoding without a real model.

``ScriptedTarget`` and ``ScriptedDrafter`` implement the protocols of ``cycle.py`` with tables. ``Tape`` is a noise that
walks every branch of a computation, one branch a row, and keeps the branch's exact probability. ``tiny_target`` and
``tiny_drafter`` are transformers small enough for float64.
"""

from __future__ import annotations

from dspark_jax.testing.scripted import ScriptedDrafter, ScriptedTarget, context_index, open_slots
from dspark_jax.testing.tape import GumbelTable, Tape, enumerate_worlds
from dspark_jax.testing.tiny import tiny_drafter, tiny_target

__all__ = [
    "GumbelTable",
    "ScriptedDrafter",
    "ScriptedTarget",
    "Tape",
    "context_index",
    "enumerate_worlds",
    "open_slots",
    "tiny_drafter",
    "tiny_target",
]

"""Measuring: parity with the reference, acceptance, confidence."""

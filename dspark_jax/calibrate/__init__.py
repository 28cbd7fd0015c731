"""Calibration of the confidence head: sequential temperature scaling and measures of how well it works."""

from __future__ import annotations

from dspark_jax.calibrate.sts import fit
from dspark_jax.calibrate.tables import Calibration, CalibrationTables, load_tables, save_tables

__all__ = ["Calibration", "CalibrationTables", "fit", "load_tables", "save_tables"]

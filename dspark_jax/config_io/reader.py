"""Typed access to the keys of one config."""

from __future__ import annotations

from typing import Any

from dspark_jax.config_io.families import Json


class Reader:
    """Typed access to the keys of one config; collects what is missing or wrong instead of raising."""

    def __init__(self, config: Json, defaults: Json) -> None:
        self.config, self.defaults = config, defaults
        self.missing: list[str] = []
        self.problems: list[str] = []

    def raw(self, key: str, default: Any = None) -> Any:
        return self.config[key] if key in self.config else self.defaults.get(key, default)

    def integer(self, key: str, default: Any = None, minimum: int = 1) -> Any:
        value = self.raw(key, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problems.append(f"{key} must be an integer >= {minimum}, found {value!r}")
            return default
        return value

    def required(self, key: str) -> int:
        if self.raw(key) is None:
            self.missing.append(key)
            return 1
        return self.integer(key, 1)

    def number(self, key: str, default: float) -> float:
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.problems.append(f"{key} must be a number > 0, found {value!r}")
            return default
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key} must be true or false, found {value!r}")
        return value is True

    def fail(self, source: str) -> None:
        """Raises the one error, if there is anything to say."""
        lines = [f"missing keys: {', '.join(self.missing)}"] if self.missing else []
        lines += self.problems
        if lines:
            raise ValueError("\n  ".join([f"{source}: this config cannot be used", *lines]))

"""What ``/metrics`` shows, in Prometheus' text format."""

from __future__ import annotations

import math
import numbers
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# Counters of the engine that are shown a second time under the name that vLLM gives them.
_AS_IN_VLLM = {
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
}

# Counters of the engine that go up and down; the others only grow.
_GAUGES = frozenset({"running", "waiting", "slots", "free_slots"})


class Metrics:
    """Counts what the service sees. Used from the event loop only."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # stop, length, cancelled, error
        self.refused: Counter[int] = Counter()  # by HTTP status
        self.active = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token_s = _Summary()
        self.request_s = _Summary()

    def render(self, engine: Mapping[str, Any], *, ready: bool) -> str:
        """The page: the service's own numbers, then the engine's, as ``dspark_engine_<name>``."""
        page = _Page()
        page.add("dspark_ready", "gauge", "1 while the engine takes requests.", int(ready))
        page.add("dspark_requests_active", "gauge", "Requests accepted and not finished.", self.active)
        page.family("dspark_requests_total", "counter", "Finished requests by reason.")
        for reason in sorted({"stop", "length", "cancelled", "error", *self.finished}):
            page.sample("dspark_requests_total", self.finished[reason], {"reason": reason})
        page.family("dspark_refused_total", "counter", "Refused requests by HTTP status.")
        for status, count in sorted(self.refused.items()):
            page.sample("dspark_refused_total", count, {"status": str(status)})
        page.add("dspark_prompt_tokens_total", "counter", "Prompt tokens of accepted requests.", self.prompt_tokens)
        page.add("dspark_generated_tokens_total", "counter", "Tokens kept in answers.", self.generated_tokens)
        page.summary("dspark_time_to_first_token_seconds", "From acceptance to the first token.", self.first_token_s)
        page.summary("dspark_request_seconds", "From acceptance to the last token.", self.request_s)
        for name, value in sorted(engine.items()):
            page.engine(name, value)
        for name in sorted(_AS_IN_VLLM.keys() & engine.keys()):
            page.add(f"vllm:{name}_total", "counter", _AS_IN_VLLM[name], engine[name])
        return page.text()


class _Summary:
    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        shown = ",".join(f'{k}="{_escape(v)}"' for k, v in (labels or {}).items())
        self._lines.append(f"{name}{'{' + shown + '}' if shown else ''} {_number(value)}")

    def add(self, name: str, kind: str, text: str, value: float) -> None:
        self.family(name, kind, text)
        self.sample(name, value)

    def summary(self, name: str, text: str, summary: _Summary) -> None:
        self.family(name, "summary", text)
        self.sample(f"{name}_sum", summary.total)
        self.sample(f"{name}_count", summary.count)

    def engine(self, name: str, value: Any) -> None:
        """A number, or a mapping of label to number; anything else is not a metric."""
        kind = "gauge" if name in _GAUGES or name.endswith("_ms") else "counter"
        full = "dspark_engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", name) + ("_total" if kind == "counter" else "")
        if isinstance(value, Mapping):
            numeric = {k: v for k, v in value.items() if isinstance(v, numbers.Real)}
            if numeric:
                self.family(full, kind, f"Engine: {name}, by key.")
            for key, number in numeric.items():
                self.sample(full, float(number), {"key": str(key)})
        elif isinstance(value, numbers.Real):
            self.add(full, kind, f"Engine: {name}.", float(value))

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _number(value: float) -> str:
    whole = math.isfinite(value) and value == int(value)
    return str(int(value)) if whole else repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

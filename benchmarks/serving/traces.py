"""Acceptance traces: what a drafter would propose behind every token of a text, and how much of it the target keeps.

A row belongs to one token of one text, the anchor: the confidences of the block drafted behind it, and how many of its
drafts equal the text that follows. Where the target's choices do not depend on the drafts (temperature 0, or the rule
``coupled``), the text is the same whatever is admitted, so a simulated request walks through these rows exactly as a
real one does: n drafts admitted at a row move it on by min(accepted, n) + 1 rows.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_jax.whole_file import replacing


@dataclasses.dataclass(frozen=True)
class Traces:
    """Texts one after the other.

    Attributes:
        survival: ``[N, G]`` float32, calibrated, rows non-increasing.
        accepted: ``[N]`` int16 drafts that the text repeats; never beyond its end.
        starts: ``[R + 1]`` first row of each text, and N.
        kinds: a word for each text (code, chat, ...).
        temperature, shift: ``[G]`` and [] of the calibration: raw confidences are needed by a static threshold.

    Raises:
        ValueError: sizes that do not fit, increasing rows, or more accepted than drafted or left.
    """

    survival: np.ndarray
    accepted: np.ndarray
    starts: np.ndarray
    kinds: tuple[str, ...]
    temperature: np.ndarray
    shift: float = 0.0

    def __post_init__(self) -> None:
        rows, width = self.survival.shape
        if self.accepted.shape != (rows,) or self.temperature.shape != (width,):
            raise ValueError(f"traces: {rows} rows of {width} drafts do not fit accepted or temperature")
        if len(self.starts) != len(self.kinds) + 1 or self.starts[0] != 0 or self.starts[-1] != rows:
            raise ValueError("traces: starts must run from 0 to the number of rows, one text a kind")
        if (np.diff(self.starts) < 1).any():
            raise ValueError("traces: a text without rows")
        if (np.diff(self.survival, axis=1) > 0).any() or (self.survival > 1).any() or (self.survival < 0).any():
            raise ValueError("traces: survival must lie in [0, 1] and not increase along a row")
        if (self.accepted < 0).any() or (self.accepted > np.minimum(width, self.left())).any():
            raise ValueError("traces: accepted must lie between 0 and the drafts, and within the text")

    def left(self) -> np.ndarray:
        """``[N]`` tokens of the text behind each anchor."""
        ends = np.repeat(self.starts[1:], np.diff(self.starts))
        return ends - np.arange(ends.size)

    def anchors(self, drafts: int) -> np.ndarray:
        """Rows that texts pass through where every cycle verifies ``drafts``: what a request that has been at work for
        long may stand at. They are harder than others: what is easy is passed over."""
        at, found = self.starts[:-1].copy(), []
        while at.size:
            found.append(at)
            step = np.minimum(self.accepted[at], drafts) + 1
            ends = self.starts[np.searchsorted(self.starts, at, side="right")]
            at = (at + step)[at + step < ends]
        return np.sort(np.concatenate(found))

    @property
    def texts(self) -> int:
        return len(self.kinds)

    @property
    def width(self) -> int:
        return self.survival.shape[1]

    def conditional(self) -> np.ndarray:
        """``[N, G]`` raw confidences: calibration undone."""
        before = np.concatenate([np.ones_like(self.survival[:, :1]), self.survival[:, :-1]], axis=1)
        calibrated = np.divide(self.survival, before, out=np.zeros_like(self.survival), where=before > 0)
        p = np.clip(calibrated.astype(np.float64), 1e-6, 1 - 1e-6)
        return 1.0 / (1.0 + np.exp(self.shift - self.temperature * np.log(p / (1 - p))))

    def of(self, *kinds: str) -> Traces:
        """The texts of some kinds. Raises ValueError where there are none."""
        chosen = [i for i, kind in enumerate(self.kinds) if kind in kinds]
        if not chosen:
            raise ValueError(f"traces: no text of kind {' or '.join(kinds)}; there are {sorted(set(self.kinds))}")
        rows = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in chosen])
        starts = np.concatenate([[0], np.cumsum([self.starts[i + 1] - self.starts[i] for i in chosen])])
        names = tuple(self.kinds[i] for i in chosen)
        return Traces(self.survival[rows], self.accepted[rows], starts, names, self.temperature, self.shift)

    def position_acceptance(self) -> list[float]:
        """``[G]`` share of drafts accepted given that those before were, over all anchors."""
        reached = [(self.accepted >= k).sum() for k in range(self.width + 1)]
        return [round(float(n / max(d, 1)), 4) for d, n in zip(reached, reached[1:], strict=False)]

    def save(self, path: str | Path) -> None:
        """A compressed .npz, which is there whole or not at all; survivals lose digits (float16)."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch, open(scratch, "wb") as file:
            np.savez_compressed(
                file,
                survival=self.survival.astype(np.float16),
                accepted=self.accepted.astype(np.int8),
                starts=self.starts.astype(np.int32),
                kinds=np.array(self.kinds),
                temperature=self.temperature.astype(np.float32),
                shift=np.float32(self.shift),
            )

    @classmethod
    def load(cls, path: str | Path) -> Traces:
        """Raises ValueError naming the file where it is no such thing, OSError where it cannot be read."""
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                return cls(
                    file["survival"].astype(np.float32),
                    file["accepted"].astype(np.int16),
                    file["starts"].astype(np.int64),
                    tuple(map(str, file["kinds"])),
                    file["temperature"].astype(np.float64),
                    float(file["shift"]) if "shift" in file else 0.0,
                )
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: no acceptance traces, or cut off: {error}; record them anew") from error


def from_texts(
    texts: Sequence[Sequence[int]],
    drafts: Sequence[np.ndarray],
    survivals: Sequence[np.ndarray],
    kinds: Sequence[str],
    temperature: np.ndarray,
    shift: float = 0.0,
) -> Traces:
    """Traces of decoded texts.

    Args:
        texts: new tokens of each request, the one of its prefill first.
        drafts, survivals: ``[n - 1, G]`` of the block behind each token but the last.
    """
    accepted = [_matches(np.asarray(text), block) for text, block in zip(texts, drafts, strict=True)]
    starts = np.concatenate([[0], np.cumsum([len(rows) for rows in accepted])])
    rows = np.concatenate([np.asarray(s, np.float32) for s in survivals])
    return Traces(rows, np.concatenate(accepted), starts, tuple(kinds), np.asarray(temperature, np.float64), shift)


def _matches(text: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """``[n - 1]`` leading drafts of each row that equal the text behind its anchor."""
    width = drafts.shape[1]
    padded = np.concatenate([text, np.full(width, -1, text.dtype)])
    follows = np.lib.stride_tricks.sliding_window_view(padded, width)[1 : len(text)]
    return np.cumprod(follows == drafts, axis=1).sum(axis=1).astype(np.int16)

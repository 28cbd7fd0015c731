"""Rows of a comparison that were trained and decoded earlier, each in a file small enough to keep beside the results.

A comparison takes hours, and a machine may be gone before the last row is trained. ``NAME.json`` holds what the table
needs of a row: how it was trained, and how many tokens every cycle of every prompt kept. The tokens are not kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from dspark_jax.data.line_file import differences, known
from dspark_jax.evaluate import report
from dspark_jax.evaluate.acceptance import Sample
from dspark_jax.evaluate.decode import NEWER, Trace
from dspark_jax.whole_file import write_whole

Facts: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class KeptRow:
    """One row.

    Attributes:
        trained: what ``timed_training.train`` says of it.
        drafts: a block in the evaluation.
        headers: of each way of sampling: everything that decides its records, the drafter left out.
        traces: of each way of sampling, one a prompt; their tokens are zeros.
        facts: of each way of sampling: what cannot be computed from the traces (``equal_texts``, of ``prompts``).
        made: environment of the measurement.
    """

    name: str
    trained: Mapping[str, Any]
    drafts: int
    headers: Mapping[str, Mapping[str, Any]]
    traces: Mapping[str, Sequence[Trace]]
    facts: Mapping[str, Mapping[str, Any]]
    made: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        trained: Mapping[str, Any],
        evaluation: Path,
        results: Mapping[str, Any],
        made: Mapping[str, Any],
    ) -> KeptRow:
        """From the folder of an evaluation and its ``results.json``."""
        headers, traces, facts = {}, {}, {}
        for run, rows in results["runs"].items():
            lines = (evaluation / "records" / run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            header, *records = map(json.loads, lines)
            headers[run] = {key: value for key, value in header.items() if key != "drafter"}
            mine = next(row for row in rows if row["name"] == name)
            found = {(line["suite"], line["index"]): line for line in records}
            # An earlier evaluation may have decoded more prompts. Those of this one are the first of their set, but
            # their numbers have gaps where a prompt was too long.
            wanted = [
                key
                for suite, count in sorted(results["suites"].items())
                for key in sorted(key for key in found if key[0] == suite)[:count]
            ]
            traces[run] = [_plain(found[key]) for key in wanted]
            facts[run] = {key: mine[key] for key in ("equal_texts", "prompts") if key in mine}
        drafts = len(mine["histogram"]) - 1
        return cls(name, dict(trained), drafts, headers, traces, facts, dict(made))

    def save(self, folder: Path) -> None:
        """Writes ``FOLDER/NAME.json``, a line a prompt."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {"name": self.name, "trained": self.trained, "drafts": self.drafts, "headers": self.headers}
        head |= {"facts": self.facts, "made": self.made}
        prompts = {
            run: [
                [t.suite, t.index, list(t.committed), list(t.offered), t.finish, len(t.tokens), t.prompt]
                for t in traces
            ]
            for run, traces in self.traces.items()
        }
        lines = [json.dumps(head)[:-1] + ', "prompts": {']
        for i, (run, rows) in enumerate(prompts.items()):
            body = ",\n".join(map(json.dumps, rows))
            lines.append(f"{json.dumps(run)}: [\n{body}\n]" + ("," if i + 1 < len(prompts) else ""))
        write_whole(folder / f"{self.name}.json", "\n".join([*lines, "}}"]) + "\n")

    @classmethod
    def load(cls, path: Path) -> KeptRow:
        """Reads what ``save`` wrote. Raises ValueError, naming the file, where it is something else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            traces = {
                run: [
                    Trace(suite, index, (0,) * tokens, tuple(committed), tuple(offered), finish, 0.0, 0, prompt)
                    for suite, index, committed, offered, finish, tokens, prompt in rows
                ]
                for run, rows in found.pop("prompts").items()
            }
            return cls(**found, traces=traces)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a row of a comparison ({error})") from error


def _plain(line: Mapping[str, Any]) -> Trace:
    trace = Trace.parse(dict(line))
    return dataclasses.replace(trace, tokens=(0,) * len(trace.tokens), seconds=0.0, emitted=0)


def require_alike(rows: Sequence[KeptRow]) -> None:
    """Raises ValueError where two rows were not decoded from the same prompts in the same way."""
    first = rows[0]
    for row in rows[1:]:
        for run in {**first.headers, **row.headers}:
            one, two = first.headers.get(run, {}), row.headers.get(run, {})
            wrong = differences(known(one, two, NEWER), known(two, one, NEWER))
            mine, its = ({(t.suite, t.index): t.prompt for t in r.traces.get(run, ())} for r in (first, row))
            if mine.keys() != its.keys():
                wrong.append(f"{len(mine.keys() ^ its.keys())} prompts that only one of them has")
            other = [key for key in mine.keys() & its.keys() if mine[key] != its[key]]
            if other:
                wrong.append(f"{len(other)} prompts of other content, the first {' '.join(map(str, min(other)))}")
            if wrong:
                raise ValueError(
                    f"{row.name} and {first.name} were decoded otherwise ({run}: {'; '.join(wrong)}): decode both "
                    "anew, or compare them apart"
                )


def measure(
    rows: Sequence[KeptRow], reference: str, groups: Mapping[str, str], resamples: int
) -> dict[str, list[dict[str, Any]]]:
    """Every way of sampling: the rows as ``evaluate.report`` measures them, the reference first. Ratios are to the
    reference; there are none where it is missing. Speeds are left out: rows may be of different days.

    Raises what ``require_alike`` raises.
    """
    rows = sorted(rows, key=lambda row: row.name != reference)
    require_alike(rows)
    first = rows[0]
    found = {}
    for run in first.headers:
        traces = {row.name: row.traces[run] for row in rows}
        samples = {row.name: Sample(row.traces[run], row.drafts, groups) for row in rows}
        entries = report.measure(samples, traces, resamples)
        for entry, row in zip(entries, rows, strict=True):
            entry.pop("tokens_per_s")
            entry |= row.facts[run]
            if first.name != reference:
                for name in [name for name in entry if name.endswith("_ratio")]:
                    del entry[name]
        found[run] = entries
    return found

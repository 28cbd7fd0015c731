"""What a compiled program does, read from XLA's scheduled text: launches, collectives, host transfers, buffers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.$-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.$-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|s8|u8|s32|u32|s64|u64|bf16|f16|f32|f64)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"(?:body|branch_computations|true_computation|false_computation|to_apply|calls)=\{?([^,}]*(?:, ?%[\w.$-]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_NO_LAUNCH = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "opt-barrier", "partition-id", "iota",
}  # fmt: skip
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction that is scheduled by itself (not inside a fusion)."""

    name: str
    shape: str
    op: str
    rest: str

    @property
    def arrays(self) -> list[tuple[str, int]]:
        """(dtype, elements) of every array it makes."""
        return [(d, math.prod(map(int, n.split(","))) if n else 1) for d, n in _ARRAY.findall(self.shape)]

    @property
    def bytes(self) -> int:
        return sum(_SIZES.get(dtype, 4) * count for dtype, count in self.arrays)


class Program:
    """A compiled program. Branches of a conditional count once each: an upper bound."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = self._parts[head[2]] = []
                if head[1]:
                    self._entry = head[2]
            elif found := _INSTRUCTION.match(line):
                current.append(Instruction(*found.groups()))

    def scheduled(self) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that runs, and how often in a run (a loop of unknown length counts as one round)."""
        yield from self._walk(self._entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self._parts[name]:
            yield instruction, times
            if instruction.op in ("while", "conditional", "call"):
                trips = _TRIPS.search(instruction.rest)
                for group in _CALLED.findall(instruction.rest):
                    for called in re.findall(r"[\w.$-]+", group):
                        if called in self._parts:
                            yield from self._walk(called, times * (int(trips[1]) if trips else 1))

    def moved(self, kernels: Mapping[str, int]) -> dict[str, int]:
        """Bytes that each instruction of a run reads and writes, by name. ``kernels``: what one call of a custom call
        whose text holds the key moves, counted by hand: its operands say what it may read, not what it does."""
        sizes = {i.name: i.bytes for part in self._parts.values() for i in part}
        found: dict[str, int] = {}
        for instruction, n in self.scheduled():
            if instruction.op in _NO_LAUNCH or instruction.op.endswith("-done"):
                continue
            own = next((size for key, size in kernels.items() if key in instruction.rest), None)
            found_bytes = self._fusion(instruction, sizes) if own is None else own
            found[instruction.name] = found.get(instruction.name, 0) + n * found_bytes
        return found

    def _fusion(self, instruction: Instruction, sizes: Mapping[str, int]) -> int:
        """Bytes of one instruction. A fusion reads of an operand what its slices and gathers take of it, and writes of
        an array that it updates in place the update."""
        operands = _operands(instruction)
        called = re.search(r"calls=%?([\w.$-]+)", instruction.rest)
        if called is None or called[1] not in self._parts:
            return instruction.bytes + sum(sizes.get(name, 0) for name in operands)
        part = self._parts[called[1]]
        inside = {i.name: i for i in part}
        read = 0
        for i in part:
            if i.op == "parameter":
                users = [u for u in part if i.name in _operands(u)]
                read += min(sum(_taken(u, i.name, inside) for u in users), i.bytes)
        updates = [i for i in part if i.op == "dynamic-update-slice"]
        kept = sum(i.bytes - inside[_operands(i)[1]].bytes for i in updates)
        written = instruction.bytes - min(kept, instruction.bytes)
        return read + written

    def launches(self) -> int:
        """Kernels, copies, library calls and collectives of a run."""
        return sum(n for i, n in self.scheduled() if i.op not in _NO_LAUNCH and not i.op.endswith("-done"))

    def collectives(self) -> Counter[tuple[str, int]]:
        """(kind, bytes of the result) with their number in a run."""
        found: Counter[tuple[str, int]] = Counter()
        for instruction, n in self.scheduled():
            kind = instruction.op.removesuffix("-start")
            if kind in _COLLECTIVES:
                found[kind, instruction.bytes] += n
        return found

    def host_transfers(self) -> list[str]:
        """Instructions that meet the host in the middle of the program, and buffers in its memory."""
        ops = ("send", "recv", "infeed", "outfeed", "host-execute")
        found = [i.name for i, _ in self.scheduled() if i.op.startswith(ops)]
        callbacks = re.findall(r'custom_call_target="([^"]*(?:callback|HostExecute|MoveToHost)[^"]*)"', self.text)
        return found + callbacks + re.findall(r"\{[0-9,]*:?[^}]*S\(5\)[^}]*\}", self.text)

    def arrays(self) -> set[tuple[str, int]]:
        """(dtype, elements) of every array that gets memory of its own."""
        return {array for i, _ in self.scheduled() if i.op not in _NO_LAUNCH for array in i.arrays}


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.$-]+)", instruction.rest.split("), ")[0])


def _taken(user: Instruction, name: str, inside: Mapping[str, Instruction]) -> int:
    """Bytes that an instruction inside a fusion reads of its operand ``name``."""
    operands = _operands(user)
    if user.op in ("dynamic-slice", "gather", "slice") and operands[0] == name:
        return user.bytes
    if user.op == "dynamic-update-slice" and operands[0] == name:
        return 0
    return inside[name].bytes

"""How many kernels a compiled program launches, read from its optimized HLO text."""

from __future__ import annotations

import collections
import re

# What launches nothing, or stands for other instructions that are counted where they are.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast call while conditional after-all partition-id replica-id "
    "copy-done async-done async-update opt-barrier add-dependency domain".split()
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(?:to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def count_launches(hlo: str) -> dict[str, int]:
    """Launches by opcode, and `total`; of what is called (command buffers, loops by known trip counts) too.

    An instruction is taken as one launch. Fusions are one; sorts and some library calls are more. Loops without a known
    trip count are taken once; of a conditional, all branches are.
    """
    computations, entry = _parse(hlo)
    counts: collections.Counter[str] = collections.Counter()
    pending = [(entry, 1)]
    while pending:
        name, times = pending.pop()
        for opcode, line in computations[name]:
            if opcode not in _FREE:
                counts[opcode] += times
            if opcode in ("call", "while", "conditional"):
                trips = _TRIPS.search(line) if opcode == "while" else None
                inner = times * (int(trips[1]) if trips else 1)
                pending += [(called, inner) for called in _called(line)]
    return {**dict(counts.most_common()), "total": counts.total()}


def count_command_buffers(hlo: str) -> int:
    """Command buffers (CUDA graphs) that the program is split into."""
    return len(re.findall(r"^%?command_buffer[\w.\-]* .*\{$", hlo, re.MULTILINE))


def _parse(hlo: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Instructions `(opcode, line)` by computation, and the entry's name."""
    computations: dict[str, list[tuple[str, str]]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            computations[name].append((instruction[1], line))
    return computations, entry


def _called(line: str) -> list[str]:
    called = _CALLED.findall(line)
    for group in _BRANCHES.findall(line):
        called += [name.strip().lstrip("%") for name in group.split(",")]
    return called

"""Describe a saved state: its position, its waiting samples, its configuration."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.text import counted
from odb_nodes.core.alignment.aligned_round import digest_of_totals, totals_from_bytes
from odb_nodes.core.contract.config import sealed_states
from odb_nodes.core.contract.state import unseal_whole
from odb_nodes.core.contract.state_file import load_state
from odb_nodes.core.loader.loader import LoaderState
from odb_nodes.core.nodes.sample_records import decode_sample, from_records
from odb_nodes.core.nodes.sample_store import from_bits
from odb_nodes.errors import StateError
from odb_nodes.tools.lengths import count_lengths
from odb_nodes.training.checkpoints.checkpoint_folders import CheckpointFolders
from odb_nodes.training.checkpoints.rank_states import rank_files

__all__ = ["Inspection", "differences", "inspect_state", "misfits", "read_inspections"]

_NOT_VALUES = ("node", "config", "digest", "root", "source", "sources")
_BINS = 8
_BAR = 40


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A description of the state of a loader.

    Attributes:
        damage: how the state is damaged; "" if it is not.
        facts: position and counts, by name.
        pool: lengths of the samples that wait to be grouped, in tokens.
        planned: lengths of the samples in planned groups of the round, in tokens.
        config: configuration of each node, by its name.
        round_digest: digest of the plan of the round, which is equal on all ranks.
        values: place in the state -> value, as text.
    """

    damage: str
    facts: Mapping[str, str]
    pool: IntArray
    planned: IntArray
    config: Mapping[str, Mapping[str, Any]]
    round_digest: int
    values: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"DAMAGED: {self.damage}"] if self.damage else []
        lines += [f"{name}: {value}" for name, value in self.facts.items()]
        lines += [f"pool: {_shown(self.pool)}", *_bars(self.pool)]
        lines += [f"planned groups: {_shown(self.planned)}", "configuration:"]
        for node, config in self.config.items():
            shown = ", ".join(f"{name} {value!r}" for name, value in config.items())
            lines.append(f"  {node}: {shown or '-'}")
        return "\n".join(lines)


def read_inspections(path: Path) -> tuple[str, list[Inspection]]:
    """Describe the states in a file, or in the files of all ranks in a folder.

    Args:
        path: a state file; the folder of a checkpoint; or the folder of `Checkpoints`, whose newest
            complete checkpoint is read.

    Returns:
        The path that was read, and the state of each rank in order, or of each virtual rank.

    Raises:
        OSError: there is no such file or folder.
        StateError: the files hold no state of a loader, or lack the state of a rank.
    """
    if path.is_dir():
        folders = CheckpointFolders(path)
        if complete := folders.complete():
            path = complete[-1]
        elif contents := folders.contents():
            missing = {name: content.missing for name, content in contents.items()}
            raise StateError(f"`{path}` has no complete checkpoint; missing ranks: {missing}.")
        states = [*map(load_state, rank_files(path))]
    else:
        states = [load_state(path)]
    return str(path), [
        inspection for state in states for inspection in _inspections(state, str(path))
    ]


def inspect_state(state: Any, name: str = "the state") -> Inspection:
    """Describe the state of a `Loader`, or of an object that holds one, which errors call `name`.

    Raises:
        StateError: the state holds no state of a loader.
    """
    return next(_inspections(state, name))


def _inspections(state: Any, name: str) -> Iterator[Inspection]:
    """Yield the description of a state, or one for each virtual rank in it."""
    loader = part_of(state, "Loader")
    if not isinstance(root := loader.get("root"), dict):
        raise StateError(f"`{name}` holds no state of a loader. Pass one that `save_state` wrote.")
    damage = ""
    try:
        unseal_whole(loader, "Loader", LoaderState)
    except StateError as error:
        damage = str(error)
    for graph in root["sources"].values() if root.get("node") == "VirtualRanks" else [root]:
        nodes = [*_nodes(graph)]
        by_name = dict(reversed([(node["node"], node) for _, node in nodes]))
        facts = _facts_of(loader, by_name)
        round_digest = 0
        content = by_name.get("WindowBucketer", {}).get("held")
        if aligner := by_name.get("RankAligner"):
            steps = totals_from_bytes(aligner["totals"], aligner["tasks"])
            round_digest = digest_of_totals(steps)
            content = aligner["given"] if content is None else content
            last = ", the last" if aligner["last"] else ""
            done = f"{aligner['emitted']} of {len(steps)} steps out{last}"
            facts["round"] = f"{aligner['round']}, {done}"
        values: dict[str, str] = {}
        for place, node in [("Loader", loader), *nodes]:
            values |= dict(_flat(node["config"], f"{place} config"))
            for key in [key for key in node if key not in _NOT_VALUES]:
                values |= dict(_flat(node[key], f"{place}.{key}"))
        yield Inspection(
            damage=damage,
            facts=facts,
            pool=_lengths(content, pooled=True),
            planned=_lengths(content, pooled=False),
            config={place: node["config"] for place, node in nodes},
            round_digest=round_digest,
            values=values,
        )


def misfits(ranks: Sequence[Inspection]) -> list[str]:
    """Return the reasons why the states of all ranks do not fit together."""
    problems = [
        f"rank {rank}: {inspection.damage}"
        for rank, inspection in enumerate(ranks)
        if inspection.damage
    ]
    first = ranks[0]
    for rank, inspection in enumerate(ranks):
        for fact in ("epoch", "step", "round"):
            if inspection.facts.get(fact) != first.facts.get(fact):
                mine, theirs = inspection.facts.get(fact), first.facts.get(fact)
                problems.append(f"rank {rank}: {fact} {mine}, but {theirs} on rank 0")
        if inspection.round_digest != first.round_digest:
            problems.append(f"rank {rank}: another plan of the round than rank 0")
        for node, config in inspection.config.items():
            if config.get("world_size") == 1 < len(ranks):
                continue  # The rank reads separate data.
            expected = {**first.config.get(node, {})}
            if "rank" in config:
                expected["rank"] = rank
            wrong = [name for name in config if config[name] != expected.get(name)]
            problems += [f"rank {rank}: {node} has `{name}` {config[name]!r}" for name in wrong]
        size = inspection.config.get("RankAligner", {}).get("world_size", len(ranks))
        if size != len(ranks):
            problems.append(f"rank {rank}: saved by {counted(size, 'rank')}, not {len(ranks)}")
    return problems


def differences(first: Inspection, second: Inspection) -> list[str]:
    """Return a line for each value that differs between two states."""
    return [
        f"{place}: {first.values.get(place, '-')} -> {second.values.get(place, '-')}"
        for place in {**first.values, **second.values}
        if first.values.get(place) != second.values.get(place)
    ]


def part_of(state: Any, node: str) -> dict[str, Any]:
    """Return the first state of a node with this name within a state; empty if there is none."""
    return dict(next((sealed for sealed in sealed_states(state) if sealed["node"] == node), {}))


def _nodes(state: Any, source: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and state of each node, from the last one of the graph to the sources."""
    if not isinstance(state, dict):
        return
    if "node" in state:
        yield f"{source}{state['node']}", state
    below = [(source, state[key]) for key in ("root", "source") if key in state]
    below += [(f"{source}{name}.", inner) for name, inner in state.get("sources", {}).items()]
    for name, inner in below:
        yield from _nodes(inner, name)


def _facts_of(loader: Mapping[str, Any], nodes: Mapping[str, Any]) -> dict[str, str]:
    collator, bucketer = nodes.get("GroupCollator", {}), nodes.get("WindowBucketer", {})
    facts = {"version": loader["version"], "digest": f"{loader.get('digest', 0):08x}"}
    facts |= {name: collator[name] for name in ("epoch", "step", "samples") if name in collator}
    facts["yielded"] = f"{loader['num_yielded']}{', epoch ended' if loader['ended'] else ''}"
    for name in ("pulled", "oversize_samples", "dropped_samples", "excluded_samples"):
        if bucketer.get(name):
            facts[name.removesuffix("_samples")] = bucketer[name]
    if skipped := bucketer.get("skipped_samples"):
        facts["skipped"] = ", ".join(f"{count} {why}" for why, count in skipped.items())
    if mixer := nodes.get("SourceMixer"):
        facts["mixture"] = ", ".join(
            f"{count} {source}" for source, count in mixer["samples"].items()
        )
    return {name: str(value) for name, value in facts.items()}


def _lengths(content: Any, *, pooled: bool) -> IntArray:
    """Return the lengths of waiting samples: of the pool, or of planned groups."""
    if content is None:
        return np.empty(0, dtype=np.int64)
    *_, records, payload = content
    if records is not None:
        lengths = from_records(records, is_numbered=True).tokens  # with keys, or without
    else:
        lengths = np.array(
            [decode_sample(sample).tokens for sample in payload or ()], dtype=np.int64
        )
    ordinals, waiting = from_bits(content)
    return lengths[np.isin(ordinals, waiting, invert=not pooled)]


def _flat(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, bytes):
        yield place, f"{len(value)} bytes, {zlib.crc32(value):08x}"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{place}.{key}")
    elif isinstance(value, (list, tuple)) and any(
        isinstance(element, (bytes, list, tuple, dict)) for element in value
    ):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{place}[{number}]")
    else:
        yield place, repr(value)


def _shown(lengths: IntArray) -> str:
    if not len(lengths):
        return "no samples"
    return (
        f"{counted(len(lengths), 'sample')}, {counted(int(lengths.sum()), 'token')}, "
        f"lengths {lengths.min()} to {lengths.max()}, median {int(np.median(lengths))}"
    )


def _bars(lengths: IntArray) -> list[str]:
    edges, counts = count_lengths(lengths, _BINS) if len(lengths) else ([], [])
    return [
        f"  {low:>7} to {high - 1:>7} {'#' * round(_BAR * count / max(counts))} {count}"
        for (low, high), count in zip(pairwise(edges), counts, strict=True)
    ]

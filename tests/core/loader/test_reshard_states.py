"""What the states of nodes hold at the beginning of an epoch, on another number of ranks."""

from dataclasses import fields

import pytest

from odb_nodes import (
    GroupCollator,
    IterableSource,
    JsonlSource,
    LengthObserver,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    SourceMixer,
    WindowBucketer,
)
from odb_nodes.core.contract import EpochState
from odb_nodes.core.loader.reshard_states import EPOCH_START
from odb_nodes.core.nodes.planned_groups import PlannedGroups

SOURCES = {"source", "sources"}  # each of which is put to the beginning itself
EPOCH = {field.name for field in fields(EpochState)}  # which the next epoch follows
LEFT_OUT = {
    *("excluded", "excluded_samples", "dropped_samples", "oversize_samples"),
    *("skipped_samples", "left_out"),
}  # counts, which `_left_out` deals to the new ranks
KEPT = {
    "GroupCollator": {"step", "samples"},
    "IterableSource": {"shard"},
    "PlannedGroups": {"limits", *LEFT_OUT},
    "RankAligner": {
        *("round", "step", "tasks", "last", "settings", "requested_max_tokens"),
        *("left_out", "unemitted_samples"),
    },
    "SourceMixer": {"samples", "tokens"},  # `_begun` counts from 0 for each source
    "WindowBucketer": {
        *("mode", "numbered", "limits", "has_own_limits", "window", *LEFT_OUT),
        "held",  # `_begun` empties it, by the mode
    },
}
"""Node -> fields that are no part of what an epoch begins with, or that a function gives."""

NODES = [
    GroupCollator,
    IterableSource,
    JsonlSource,
    LengthObserver,
    ParallelProcessor,
    PlannedGroups,
    RankAligner,
    ShardedSampler,
    SourceMixer,
    WindowBucketer,
]


@pytest.mark.parametrize("node", NODES)
def test_each_field_of_a_state_begins_the_epoch_anew_or_is_kept_by_name(node):
    name, declared = node.__name__, {field.name for field in fields(node.STATE)}
    reset, kept = {*EPOCH_START.get(name, {})}, KEPT.get(name, set())
    assert not reset & kept
    assert reset | kept == declared - SOURCES - EPOCH


def test_the_table_has_no_other_nodes():
    assert {*EPOCH_START} | {*KEPT} == {node.__name__ for node in NODES}

"""Groups that are cut to the same costs on all ranks, through resumes; and where they are not."""

import random

import pytest
from aligned_ranks import TIMEOUT_S, assert_resumes, epoch_of, on_ranks
from torchdata.nodes import IterableWrapper

from odb_nodes import LengthObserver, Loader, RankAligner, WindowBucketer
from odb_nodes.nodes.read_ahead import ReadAhead


def tokens_of_rank(rank):
    rng = random.Random(rank)
    return [rng.randint(1, 60) for _ in range(500)]


def loader_over(exchange, tokens, window=64, reads_ahead=False, **options):
    """Over samples of these lengths, each rank for itself."""
    samples = [{"input_ids": [1] * n, "id": (exchange.rank, at)} for at, n in enumerate(tokens)]
    groups = WindowBucketer(LengthObserver(IterableWrapper(samples)), 100, window)
    groups = ReadAhead(groups, 4) if reads_ahead else groups
    return Loader(RankAligner(groups, exchange, timeout_s=TIMEOUT_S, **options))


def has_caps(state):
    """Whether the state of a graph has caps."""
    if not isinstance(state, dict):
        return False
    own = state.get("caps") or (state["settings"][1] if "settings" in state else ())
    return bool(own) or any(map(has_caps, state.values()))


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {"cost_fn": len}), (2, {"reads_ahead": True})]
)
def test_there_are_none_of_one_rank_nor_of_other_costs_nor_where_a_node_reads_ahead(ranks, options):
    def run(exchange):
        return epoch_of(loader_over(exchange, tokens_of_rank(exchange.rank)[:200], **options))

    assert not any(has_caps(state) for _, states in on_ranks(ranks, run) for state in states)


def test_a_rank_that_has_drained_in_a_short_round_fills_with_the_same_sample_again():
    def make(exchange):
        rank, size = exchange.rank, [118, 260, 260][exchange.rank]
        seeds = [1000 * rank + index + (10**6 if rank == 0 else 0) for index in range(size)]
        shortest, most, times = (3, 9, 3) if rank == 0 else (1, 12, 5)
        tokens = [times * random.Random(seed).randint(shortest, most) for seed in seeds]
        return loader_over(exchange, tokens, window=40)

    whole = on_ranks(3, lambda exchange: epoch_of(make(exchange)))
    place = len(whole[0][0]) - 3
    assert whole[0][0][place].is_filler
    assert_resumes(make, whole, [place])

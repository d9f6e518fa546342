"""A run goes on with another number of ranks: what the resume machine does not see of it."""

import pytest
import torch
from aligned_ranks import on_ranks
from elastic import (
    ENDED_EARLY,
    LEFT_OUT,
    job,
    make,
    resharded,
    states_at,
    whole,
)

from odb_nodes import StateError, TokenBudget, reshard
from odb_nodes.loader.reshard_nodes import dealt_by_tokens

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT, ENDED_EARLY)


@pytest.mark.parametrize("step", [0, 3, -1])
def test_as_many_ranks_as_before_get_their_states_as_they_are(step):
    states = states_at(whole(3), step)
    found = reshard(states[::-1], 3)
    assert found == states
    assert all(one is not state for one, state in zip(found, states, strict=True))


def test_groups_are_under_a_budget_that_is_lowered_at_once():
    states = resharded(job(3, steps=5), -1, 2)

    def run(exchange):
        loader = make(exchange, token_budget=TokenBudget(50, oversize="drop"))
        loader.load_state_dict(states[exchange.rank], change_budget=True)
        return [batch["input_ids"].numel() for batch in loader]

    assert max(max(sizes) for sizes in on_ranks(2, run)) <= 50


def test_where_ranks_end_with_the_first_it_goes_on_until_the_last_round():
    begun = job(3, uneven="stop")
    places = range(min(len(found) for found, _ in begun))
    refused = []
    for step in places:
        try:
            resharded(begun, step, 2)
        except StateError as error:
            assert "last round" in str(error)
            refused.append(step)
    assert refused == [*places][len(places) - len(refused) :] and len(refused) < 10


def test_samples_are_dealt_to_as_many_and_as_long():
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 1000, (1000,), generator=rng).numpy()
    for ranks in (1, 3, 7):
        owners = dealt_by_tokens(tokens, ranks)
        shares = [tokens[owners == rank] for rank in range(ranks)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(one.sum() for one in shares) - min(one.sum() for one in shares) <= 1000

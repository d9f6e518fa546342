"""A run goes on with another number of ranks: what the resume machine does not see of it."""

import random

import pytest
import torch
from aligned_ranks import on_ranks
from elastic import (
    ENDED_EARLY,
    LEFT_OUT,
    SAMPLES,
    ids_of,
    job,
    make,
    resharded,
    states_at,
    whole,
)
from gradients import LanguageModel, gradient_of, mean_loss, relative_error

from odb_nodes import PaddingCollate, StateError, TokenBudget, reshard
from odb_nodes.loader.reshard_nodes import dealt_by_tokens

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT, ENDED_EARLY)


@pytest.mark.parametrize("step", [0, 3, -1])
def test_as_many_ranks_as_before_get_their_states_as_they_are(step):
    states = states_at(whole(3), step)
    found = reshard(states[::-1], 3)
    assert found == states
    assert all(one is not state for one, state in zip(found, states, strict=True))


def tokens_of(index):
    rng = random.Random(index)
    tokens = [rng.randrange(33) for _ in range(rng.randint(2, 24))]
    labels = [one if rng.random() < 0.6 else -100 for one in tokens]
    return {"input_ids": tokens, "labels": labels, "id": index}


@pytest.mark.parametrize(("before", "after", "accumulate"), [(2, 3, 1), (3, 4, 2)])
def test_the_gradient_is_that_of_one_process(before, after, accumulate):
    options = {"process_fn": tokens_of, "accumulate": accumulate, "exclude": None}
    begun = job(before, steps=2 * accumulate, **options)
    rest = job(after, resharded(begun, -1, after), **options)
    assert ids_of([*begun, *rest])[0] == [*range(SAMPLES)]
    model, ids, expected = LanguageModel(), [], None
    for of_ranks in zip(*(found for found, _ in rest), strict=True):
        for info, own in of_ranks:
            if own:
                loss = mean_loss(model, PaddingCollate()([tokens_of(index) for index in own]))
                (loss * info.loss_scale / after).backward()
            ids += own
        if of_ranks[0][0].ends_optimizer_step:
            found = gradient_of(model)
            model.zero_grad()
            mean_loss(model, PaddingCollate()([tokens_of(index) for index in ids])).backward()
            expected = gradient_of(model)
            assert relative_error(found, expected) < 1e-12
            model.zero_grad()
            ids = []
    assert not ids and expected is not None


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

"""Planned samples that go back into the pool, of a source without keys: what states hold then."""

from torch.utils.data import IterableDataset

from odb_nodes import (
    ODBDataLoader,
)


class Numbers(IterableDataset):
    def __iter__(self):
        yield from ({"input_ids": [n] * (n % 7 + 1)} for n in range(80))


def test_a_rank_that_fills_with_a_sample_of_another_restores_without_keys():
    """Whose number in the epoch is one of the other rank."""

    def make():
        odd = range(1, 80, 2)  # all that the second rank has
        options = {"token_budget": 16, "window": 8, "round_size": 4, "virtual_ranks": 2}
        return ODBDataLoader(Numbers(), exclude=odd, num_workers=0, **options)

    states, found = [], []
    for batch in (loader := make()):
        found.append(batch["input_ids"].tolist())
        states.append(loader.state_dict())
    for step in range(1, len(found), 6):
        resumed = make()
        resumed.load_state_dict(states[step - 1])
        assert [batch["input_ids"].tolist() for batch in resumed] == found[step:]

import pytest
from graphs import ABOVE, BELOW, make

from odb_nodes.testing import assert_resumes_exactly


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("below", BELOW)
def test_every_step_of_three_epochs_over_every_source(below, state, exhaustive, sampled):
    if below == "ParallelMapper-process" and not exhaustive:
        pytest.skip("torchdata forks while its reader thread runs: now and then a worker hangs")
    options = sampled(every=7, horizon=12, chain=1)
    report = assert_resumes_exactly(lambda: make(below, state), epochs=3, **options)
    assert report.steps > 40


@pytest.mark.parametrize("above", ABOVE)
def test_every_step_of_three_epochs_under_every_node(above, sampled):
    assert_resumes_exactly(
        lambda: make("Mapper", above=above), epochs=3, **sampled(every=7, horizon=12, chain=1)
    )

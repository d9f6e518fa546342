"""The options of the whole graph: one declaration that everything else follows."""

import inspect
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import get_type_hints

import pytest

from odb_nodes import ODBDataLoader, RankAligner, WindowBucketer, WorkerOptions
from odb_nodes.integrations.step_estimate import estimate_steps
from odb_nodes.loader.options import BatchOptions, LoaderOptions
from odb_nodes.planning import SimulationOptions, TokenBudget
from odb_nodes.planning.simulation import SimulationKeywords
from odb_nodes.tools.simulate import simulate, simulate_steps


def parameters_of(function):
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "dataset")
    }


def test_the_signature_of_the_loader_has_the_names_types_and_defaults_of_the_options():
    signature = {
        name: (parameter.annotation, parameter.default)
        for name, parameter in parameters_of(ODBDataLoader.__init__).items()
    }
    declared = {
        field.name: (
            field.type,
            inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(LoaderOptions)
    }
    assert signature == declared


def test_all_options_of_the_loader_are_keywords():
    kinds = {parameter.kind for parameter in parameters_of(ODBDataLoader.__init__).values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_the_docstring_of_the_loader_explains_every_option():
    documented = inspect.getdoc(ODBDataLoader)
    assert [
        one.name for one in fields(LoaderOptions) if f"\n    {one.name}: " not in documented
    ] == []


@pytest.mark.parametrize("node", [WindowBucketer, RankAligner])
def test_the_nodes_have_the_defaults_of_the_options(node):
    declared = {one.name: one.default for one in fields(LoaderOptions)}
    shared = {
        name: parameter.default
        for name, parameter in parameters_of(node.__init__).items()
        if name in declared
    }
    assert len(shared) >= 2
    assert shared == {name: declared[name] for name in shared}


@pytest.mark.parametrize("options", [BatchOptions, LoaderOptions])
def test_options_are_keyword_only_and_frozen(options):
    with pytest.raises(TypeError):
        options(64)
    with pytest.raises(FrozenInstanceError):
        options(token_budget=64).window = 3


@pytest.mark.parametrize(
    ("option", "error", "rule"),
    [
        ({"token_budget": 0}, ValueError, "`token_budget` must be"),
        ({"window": 0}, ValueError, "`window` must be in 1.."),
        ({"round_size": "x"}, TypeError, "`round_size` must be an integer"),
        ({"uneven": "x"}, ValueError, r'`uneven` must be one of \("fill", "join", "stop"\), but'),
        ({"accumulate": True}, TypeError, "`accumulate` must be an integer"),
        ({"seed": 1.5}, TypeError, "`seed` must be an integer"),
        ({"collate_fn": 3}, TypeError, "`collate_fn` must be a function or None"),
        ({"observe": 3}, TypeError, "`observe` must be a function or None"),
        ({"prefetch": -1}, ValueError, "`prefetch` must be in 0.."),
        (
            {"state": "x"},
            ValueError,
            r'`state` must be one of \("replay", "payload"\), but is \'x\'',
        ),
        (
            {"workers": 4},
            TypeError,
            "`workers` must be a `WorkerOptions` or None, but is 4 instead",
        ),
        ({"timeout_s": 0}, ValueError, "`timeout_s` must be seconds, above 0, but is 0 instead"),
        (
            {"timeout_s": "x"},
            ValueError,
            "`timeout_s` must be seconds, above 0, but is 'x' instead",
        ),
        ({"num_workers": -1}, ValueError, "`num_workers` must be in 0.."),
        ({"sharded": 1}, TypeError, "`sharded` must be True or False"),
        ({"loss_scaling": None}, ValueError, '`loss_scaling` must be one of .*"approx"'),
        ({"num_workers": 2, "workers": WorkerOptions()}, ValueError, "must not both be given"),
    ],
)
def test_an_option_that_is_not_valid_is_named(option, error, rule):
    with pytest.raises(error, match=rule):
        LoaderOptions(**{"token_budget": 64, **option})
    with pytest.raises(error, match=rule):
        ODBDataLoader([[1]], **{"token_budget": 64, **option})


@pytest.mark.parametrize("function", [simulate, lambda _, **options: estimate_steps([], **options)])
@pytest.mark.parametrize("option", [{"window": 0}, {"accumulate": 0}, {"world_size": 0}])
def test_simulations_and_estimates_check_their_options_likewise(function, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"`{name}` must be in 1.."):
        function([1], **{"world_size": 1, "budget": 64, **option})


def test_the_keywords_of_simulations_and_estimates_are_the_fields_of_the_options():
    assert SimulationKeywords.__required_keys__ == {
        field.name for field in fields(SimulationOptions) if field.default is MISSING
    }
    assert get_type_hints(SimulationKeywords) == get_type_hints(SimulationOptions)
    for function in (simulate, simulate_steps, estimate_steps):
        annotation = inspect.signature(function).parameters["options"].annotation
        assert annotation == f"Unpack[{SimulationKeywords.__name__}]"


def test_an_option_that_does_not_exist_is_an_error():
    with pytest.raises(TypeError, match="'windw'"):
        simulate([1], world_size=1, budget=64, windw=3)  # type: ignore[call-arg]


def test_a_trainer_completes_the_options_that_a_user_decides():
    decided = BatchOptions(token_budget=64, window=3, collate_fn=list)
    options = decided.loader_options(seed=5, collate_fn=tuple)
    assert options == LoaderOptions(token_budget=64, window=3, collate_fn=tuple, seed=5)


def test_an_integer_stands_for_a_budget_of_padded_tokens():
    assert LoaderOptions(token_budget=64).budget == TokenBudget(64)


@pytest.mark.parametrize(
    ("options", "in_flight"),
    [
        ({"window": 1000, "num_workers": 2}, 1000),
        ({"window": 10, "num_workers": 2}, 4 * 32 * 2),
        ({"window": 10, "workers": WorkerOptions(num_workers=2, chunk_size=5)}, 40),
        ({"window": 10, "workers": WorkerOptions(num_workers=2, in_flight_samples=7)}, 7),
    ],
)
def test_the_samples_in_flight_refill_the_pool_unless_their_number_is_given(options, in_flight):
    assert LoaderOptions(token_budget=64, **options).worker_options.in_flight_samples == in_flight

"""The options of the whole graph: one declaration that everything else follows."""

import inspect
import io
from dataclasses import MISSING, fields
from typing import get_type_hints

import numpy as np
import pytest
import torch

from odb_nodes import (
    ODBDataLoader,
    RankAligner,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.loader.options import BatchOptions, LoaderOptions
from odb_nodes.core.planning import SimulationOptions
from odb_nodes.core.planning.simulation import SimulationKeywords
from odb_nodes.tools.estimate import estimate_steps
from odb_nodes.tools.simulate import simulate, simulate_steps

KEYWORD = inspect.Parameter.KEYWORD_ONLY


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


def test_the_docstring_of_the_loader_explains_every_option_and_editors_are_shown_them():
    documented = inspect.getdoc(ODBDataLoader)
    assert all(f"\n    {field.name}: " in documented for field in fields(LoaderOptions))
    shown = inspect.signature(ODBDataLoader).parameters
    assert {"dataset", *(field.name for field in fields(LoaderOptions))} == {*shown}
    assert {parameter.kind for name, parameter in shown.items() if name != "dataset"} == {KEYWORD}


@pytest.mark.parametrize("node", [WindowBucketer, RankAligner])
def test_the_nodes_have_the_defaults_of_the_options(node):
    declared = {field.name: field.default for field in fields(LoaderOptions)}
    shared = {
        name: parameter.default
        for name, parameter in parameters_of(node.__init__).items()
        if name in declared
    }
    assert len(shared) >= 2
    assert shared == {name: declared[name] for name in shared}


INVALID = [
    ("token_budget", 0, ValueError, "must be in 1.."),
    (
        "token_budget",
        "auto",
        TypeError,
        'must be .*, but is "auto".*`odb_nodes.memory.find_budget`',
    ),
    ("window", 0, ValueError, "must be in 1.."),
    ("window", "Auto", ValueError, 'must be "auto" or a number'),
    ("collate_in", "threads", ValueError, r'must be one of \("auto", "workers", "main"\)'),
    ("round_size", "x", TypeError, "must be an integer"),
    ("virtual_ranks", 0, ValueError, "must be in 1.."),
    ("uneven", "x", ValueError, r'must be one of \("fill", "stop"\), but is \'x\''),
    ("accumulate", True, TypeError, "must be an integer"),
    ("seed", 1.5, TypeError, "must be an integer"),
    ("collate_fn", 3, TypeError, "must be a function or None"),
    ("process_fn", "x", TypeError, "must be a function or None, but is 'x'"),
    ("process_fn", {"a": len}, TypeError, "must be .* for a single dataset, but is a dict"),
    ("observe", 3, TypeError, "must be a function or None"),
    ("lengths", "n_tokens", ValueError, "must name a column or a file"),
    ("prefetch", -1, ValueError, "must be in 0.."),
    ("state", "x", ValueError, r'must be one of \("replay", "payload"\), but is \'x\''),
    ("workers", 4, TypeError, "must be a `WorkerOptions` or None, but is 4 instead"),
    ("timeout_s", 0, ValueError, "must be in .0, "),
    ("timeout_s", float("inf"), ValueError, "must be in .0, .* but is inf"),
    ("exclude", 3, TypeError, "must be integers, a mapping"),
    ("largest_first", -1, ValueError, "must be in 0.."),
    ("window_start", "x", ValueError, r'must be one of \("auto", "early", "full"\)'),
    ("tasks", "chat", TypeError, "must be a list of names, but is 'chat'"),
    ("diversity", -0.5, ValueError, r"must be in \[0, 1\], but is -0.5"),
    ("step_time", "x", TypeError, "must be a .StepTime., a function or None"),
    ("shuffle", "x", TypeError, "must be True or False"),
    ("num_workers", -1, ValueError, "must be in 0.."),
    ("sampler", 3, TypeError, "must be an iterable"),
    ("sampler", iter([0]), TypeError, "must be .*begins the order anew"),
    ("pin_memory", "x", TypeError, "must be True or False"),
    ("process_group", "x", TypeError, "must be a process group"),
    ("sharded", 1, TypeError, "must be True or False"),
    ("loss_scaling", None, ValueError, 'must be one of .*"approx"'),
    ("weights", 3, ValueError, "must be None, unless `dataset` is a dict"),
]


@pytest.mark.parametrize(("option", "value", "error", "rule"), INVALID)
def test_an_option_that_is_not_valid_is_named_before_anything_runs(option, value, error, rule):
    with pytest.raises(error, match=rf"^`{option}(\['a'\])?` {rule}"):
        ODBDataLoader([[1]], **{"token_budget": 64, option: value})


def test_each_option_is_checked():
    assert {option for option, *_ in INVALID} == {field.name for field in fields(LoaderOptions)}


def test_options_may_be_small_integers_of_numpy():
    data = [{"input_ids": [0] * (n % 50 + 4)} for n in range(300)]
    names = ("window", "round_size", "accumulate", "seed", "largest_first")
    states = []
    for kind in (int, np.int8, np.uint64):
        workers = WorkerOptions(chunk_size=kind(100), in_flight_samples=kind(100))
        numbers = {name: kind(100) for name in names} | {"virtual_ranks": kind(3)}
        loader = ODBDataLoader(data, token_budget=kind(120), workers=workers, **numbers)
        keys = [key for batch in loader for key in pop_step_info(batch).keys]
        assert sorted({*keys}) == [*range(300)]
        states.append(loader.state_dict())
        torch.load(io.BytesIO(saved(states[-1])), weights_only=True)
    assert states[0] == states[1] == states[2]


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_no_option_of_a_made_loader_can_be_set():
    loader = ODBDataLoader([{"input_ids": [1]}], token_budget=64)
    for name in ("dataset", *(field.name for field in fields(LoaderOptions))):
        with pytest.raises(
            AttributeError, match=f"`{name}` cannot be set .* Make another loader with"
        ):
            setattr(loader, name, 5)
    loader.note = 5
    assert loader.note == 5


def test_a_subclass_may_have_properties_and_arguments_of_any_name():
    class Mine(ODBDataLoader):
        def __init__(self, seed):
            super().__init__([{"input_ids": [1]}], token_budget=64, seed=seed)
            self.seed = seed

        @property
        def window(self):
            return self.note

        @window.setter
        def window(self, value):
            self.note = value

    loader = Mine(3)
    loader.window = 7
    assert (loader.seed, loader.window) == (3, 7)
    assert [*inspect.signature(Mine).parameters] == ["seed"]


INVALID_OF_WORKERS = [
    ("num_workers", -1, ValueError, "must be in 0.."),
    ("method", "fork", ValueError, r'must be one of \("process", "thread", "ray"\)'),
    ("start_method", "x", ValueError, 'must be one of .*"spawn"'),
    ("chunk_size", 0, ValueError, "must be in 1.."),
    ("in_flight_samples", 0, ValueError, "must be in 1.."),
    ("in_flight_bytes", 0, ValueError, "must be in 1.."),
    ("timeout_s", float("nan"), ValueError, "must be in .0, "),
    ("timeout_s", 1e30, ValueError, "must be in .0, "),
    ("worker_init_fn", 3, TypeError, "must be a function or None, but is 3"),
]


@pytest.mark.parametrize(("option", "value", "error", "rule"), INVALID_OF_WORKERS)
def test_an_option_of_the_workers_that_is_not_valid_is_named(option, value, error, rule):
    with pytest.raises(error, match=f"^`{option}` {rule}"):
        WorkerOptions(**{option: value})


def test_each_option_of_the_workers_is_checked():
    checked = {option for option, *_ in INVALID_OF_WORKERS}
    assert checked == {field.name for field in fields(WorkerOptions)}


@pytest.mark.parametrize("option", [{"start_method": "spawn"}, {"worker_init_fn": print}])
def test_options_of_processes_are_refused_for_threads(option):
    (name,) = option
    with pytest.raises(ValueError, match=f'`{name}` must be None where `method` is "thread"'):
        WorkerOptions(num_workers=1, method="thread", **option)


def test_the_keywords_of_simulations_and_estimates_are_the_fields_of_the_options():
    assert SimulationKeywords.__required_keys__ == {
        field.name for field in fields(SimulationOptions) if field.default is MISSING
    }
    assert get_type_hints(SimulationKeywords) == get_type_hints(SimulationOptions)
    for function in (simulate, simulate_steps, estimate_steps):
        annotation = inspect.signature(function).parameters["options"].annotation
        assert annotation == f"Unpack[{SimulationKeywords.__name__}]"


def test_a_trainer_completes_the_options_that_a_user_decides():
    decided = BatchOptions(token_budget=64, window=3, collate_fn=list)
    options = decided.loader_options(seed=5, collate_fn=tuple)
    assert options == LoaderOptions(token_budget=64, window=3, collate_fn=tuple, seed=5)


@pytest.mark.parametrize(
    ("options", "in_flight"),
    [
        ({"window": 1000, "num_workers": 2}, 1000),
        ({"window": 10, "num_workers": 2}, 4 * 32 * 2),
        ({"window": 10, "workers": WorkerOptions(num_workers=2, chunk_size=5)}, 40),
        ({"window": 10, "workers": WorkerOptions(num_workers=2, in_flight_samples=7)}, 7),
        ({"num_workers": 2}, 1024),
    ],
)
def test_the_samples_in_flight_are_those_of_a_refill_unless_given(options, in_flight):
    assert LoaderOptions(token_budget=64, **options).worker_options.in_flight_samples == in_flight

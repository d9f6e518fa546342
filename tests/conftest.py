"""Which tests are slow and why, and how much of what can be sampled is tested."""

import os
import random
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

HERE = Path(__file__).parent
FAST = "not slow"

# Hypothesis: examples of each property. `fast` goes with `-m "not slow"`, `ci` with all tests.
EXAMPLES = {"fast": 25, "ci": 100, "exhaustive": 1000}

# Files and folders in which every test is slow; what else is slow carries one of these markers.
SLOW_PATHS = {
    "ranks": [
        "alignment/exchange",
        "alignment/test_programs_of_ranks.py",
        "vision/test_modalities.py",
    ],
    "workers": [
        "cli/test_without_the_extra.py",
        "integrations/test_imports.py",
        "loader/test_collate_in_memory.py",
        "loader/test_hygiene.py",
        "loader/test_soak.py",
        "processing/test_faults.py",
    ],
    "frameworks": [
        "_compat/test_accelerate.py",
        "_compat/test_lightning.py",
        "_compat/test_transformers.py",
        "collate/test_compiled_shapes.py",
        "integrations/test_accelerate.py",
        "integrations/test_exclude_in_trainers.py",
        "integrations/test_huggingface.py",
        "integrations/test_ledgers.py",
        "integrations/test_lightning.py",
        "integrations/test_lightning_ranks.py",
        "integrations/test_lightning_virtual_ranks.py",
        "integrations/test_monitors.py",
        "integrations/test_other_ranks.py",
        "integrations/test_llama_factory_trainer.py",
        "integrations/test_run_states.py",
        "integrations/test_trainer_auto_budget.py",
        "integrations/test_trainer_columns.py",
        "integrations/test_trainer_losses.py",
        "integrations/test_trainer_memory.py",
        "integrations/test_trainer_weights.py",
        "memory/test_generation.py",
        "sources/test_hf_datasets.py",
    ],
    "sweep": [
        "loader/test_resume.py",
        "memory/test_find_budget.py",
        "memory/test_guard.py",
        "vision/test_augmentation.py",
        "vision/test_mixed_images.py",
    ],
}


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="slow sweeps in full, not sampled")


def pytest_configure(config):
    for name, examples in EXAMPLES.items():
        settings.register_profile(name, max_examples=examples, deadline=None)
    fitting = "fast" if config.option.markexpr == FAST else "ci"
    fitting = "exhaustive" if config.getoption("--exhaustive") else fitting
    settings.load_profile(config.getoption("--hypothesis-profile") or fitting)


def marker_of_path(path):
    """The marker that all tests of a file carry, or None."""
    relative = path.relative_to(HERE)
    for marker, paths in SLOW_PATHS.items():
        if any(relative.is_relative_to(one) for one in paths):
            return marker
    return None


def pytest_ignore_collect(collection_path, config):
    """Do not even import what none of the asked tests is in: frameworks take many seconds."""
    if config.option.markexpr == FAST and collection_path.is_relative_to(HERE):
        return True if marker_of_path(collection_path) else None
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--exhaustive"):
        leave_out_cases(config, items)
    for item in items:
        if item.path.is_relative_to(HERE) and (marker := marker_of_path(item.path)):
            item.add_marker(marker)
        if any(item.get_closest_marker(name) for name in SLOW_PATHS):
            item.add_marker("slow")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def leave_out_cases(config, items):
    """Deselect most cases of the tests that are marked so; each value of a parameter stays."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.split("[")[0]].append(item)
    left_out = [item for test in cases.values() for item in not_needed(test)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def not_needed(cases):
    """Return the cases of a test but for a sample that has every value of every parameter."""
    (every,) = cases[0].get_closest_marker("sampled").args
    rest, missing = [*cases], set().union(*map(values_of, cases))
    random.Random(cases[0].originalname).shuffle(rest)
    while missing or len(cases) - len(rest) < len(cases) / every:
        chosen = max(rest, key=lambda case: len(values_of(case) & missing))
        rest.remove(chosen)
        missing -= values_of(chosen)
    return rest


def values_of(case):
    return {(name, id(value)) for name, value in case.callspec.params.items()}


@pytest.fixture(scope="session")
def exhaustive(request):
    """Whether slow sweeps run in full."""
    return request.config.getoption("--exhaustive")


@pytest.fixture(scope="session")
def sampled(exhaustive):
    """`sampled(every=5)` gives these options to a sweep, or with `--exhaustive` none of them."""
    return lambda **options: {} if exhaustive else options


@pytest.fixture(scope="session", autouse=True)
def fresh_ranks(exhaustive):
    """With `--exhaustive`, every rank has an interpreter of its own."""
    if exhaustive:
        from rank_jobs import RankJob

        RankJob.fresh = True


@pytest.fixture
def new_threads():
    """Tell which threads run now that did not run before the test."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]

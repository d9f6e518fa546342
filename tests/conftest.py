import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="slow sweeps in full, not sampled")


@pytest.fixture
def exhaustive(request):
    """Whether slow sweeps run in full."""
    return request.config.getoption("--exhaustive")

"""The networks of these tests are so small that a second compute thread costs more than it brings."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # it is made for Linux only
    collect_ignore = ["test_triton.py", "test_cuda_graphs.py"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

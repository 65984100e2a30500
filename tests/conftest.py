"""What every test process shares: Triton's interpreter where there is no GPU, the `gpu` marker, the device."""

import os

import pytest
import torch
from tests.interpreter import patch_once_per_launch

import nearfield_lab

HAS_GPU = torch.cuda.is_available()

# Triton reads this when a kernel is declared, so it is set before any test module is imported.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    patch_once_per_launch()

# Tensors are small here: threads would only wait for each other, and for those of other workers.
torch.set_num_threads(1)

# NumPy's remarks on Triton's interpreter, which makes loop bounds of arrays and takes the maximum of NaNs.
INTERPRETER_WARNINGS = (
    "ignore:Conversion of an array with ndim:DeprecationWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
)

# torch's remarks on itself: older releases still import parts they have deprecated.
TORCH_WARNINGS = ("ignore:.*torch.jit.*deprecated:DeprecationWarning",)

# A GPU machine may have pytest alone; the GPU tests do without hypothesis.
try:
    import hypothesis
except ModuleNotFoundError:
    pass
else:
    # Times vary with the machine's load: a slow example is not a failure.
    hypothesis.settings.register_profile("nearfield", deadline=None)
    hypothesis.settings.load_profile("nearfield")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, instead of skipping the GPU tests, without a CUDA device",
    )
    parser.addoption(
        "--shard",
        metavar="K/N",
        help="run every N-th test only, from the K-th (0 to N - 1): for processes of their own, under a sanitizer",
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in INTERPRETER_WARNINGS + TORCH_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    if config.getoption("--require-gpu") and not HAS_GPU:
        raise pytest.UsageError("--require-gpu needs a CUDA device; torch.cuda.is_available() is False.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shard := config.getoption("--shard"):
        first, step = map(int, shard.split("/"))
        items[:] = items[first::step]
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")


assert nearfield_lab.__version__  # imported, so that its recipes are known where it is not installed

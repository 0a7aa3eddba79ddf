"""What every test shares: markers by folder, the folder of golden data, and a fixed number of torch threads."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"
MARKERS = {
    "unit": "needs nothing but a CPU",
    "contract": "holds every implementation of one interface, or the repository itself, to the same rules",
    "property": "searches for counterexamples with Hypothesis",
    "golden": "compares with the reference's numbers; needs the shared folder beside the repository",
    "gpu": "needs an accelerator",
    "bench": "runs a benchmark and reads its report; asserts no time",
}
# Tests work on tiny tensors, where one thread is fastest; what must hold for several asks for `two_threads`.
TEST_THREADS = 1
# Without an accelerator kernels are interpreted; triton reads this when it is imported, so nobody may do so before.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests of the server import what serves; they are left out, and the header says so, where that is not installed.
NO_SERVER = [name for name in ("fastapi", "httpx", "prometheus_client", "uvicorn") if find_spec(name) is None]
collect_ignore_glob = ["unit/test_serve_*.py"] if NO_SERVER else []


def pytest_report_header() -> list[str]:
    return [f"tests of the server are left out: {', '.join(NO_SERVER)} not installed"] if NO_SERVER else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="rewrite the files in tests/contract/snapshots from the code as it is",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, need in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {need}")
    torch.set_num_threads(TEST_THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the folder it lies in, and skip what needs an accelerator where there is none."""
    tests = Path(__file__).resolve().parent
    skip_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="no accelerator on this machine")
    for item in items:
        folder = item.path.resolve().relative_to(tests).parts[0]
        if folder in MARKERS:
            item.add_marker(folder)
        if skip_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(skip_gpu)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of golden data and corpora that lies beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("the shared folder does not lie beside this checkout")
    return SHARED


@pytest.fixture(scope="module", autouse=True)
def no_team_stays() -> Iterator[None]:
    """End the ranks that engines of a file's tests shared; the next file may want another number of them."""
    yield
    teams = sys.modules.get("dspark.engine.ranks.team")
    while teams is not None and teams._OWN:
        teams._OWN.pop().close()


@pytest.fixture
def update_snapshots(request: pytest.FixtureRequest) -> bool:
    """True when the run was asked to rewrite the frozen surfaces."""
    return bool(request.config.getoption("--update-snapshots"))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Run one test with two torch threads: bits must not depend on how the work is shared out."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(TEST_THREADS)

"""Shared by the whole suite: processor limits and compiled kernels."""

import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from edgeinfer_kernels.cuda.driver import list_gpus

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    # One worker runs per processor. Threads of numpy and torch would spin for a third of the time. Read when
    # they are imported first.
    os.environ.setdefault(name, "1")
# Each worker, and each program that a test starts, would otherwise compile all modules to bytecode again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _has_gpu() -> bool:
    """Whether torch finds a GPU. It takes over a second to import, and isn't without a driver."""
    if find_spec("torch") is None or not list_gpus():
        return False
    import torch

    return bool(torch.cuda.is_available())


if not _has_gpu():
    # Triton reads it when a kernel is defined, so it is set before a test module imports one.
    os.environ["TRITON_INTERPRET"] = "1"
BY_KERNELS = {"kernels", "kernels_for"}
OBJECTS_BEFORE_COLLECTION = 10_000
"""With Python's default of 700 the tests of a chat start a full collection once a second."""
gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
gc.disable()  # Until the tests are found: their modules are no garbage.


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of the fuzz and fault tests to run."""
    parser.addoption(
        "--attack-share",
        type=float,
        default=0.1,
        help="which part of the cases the slow fuzz and fault tests run (0.1; all, and every_case: 1)",
    )


def needs(package: str) -> pytest.MarkDecorator:
    """A mark that skips tests without a package. Unlike `importorskip` it leaves the import to the tests, as
    each worker imports every module, and some packages take up to 0.7 s.
    """
    return pytest.mark.skipif(find_spec(package) is None, reason=f"could not find {package}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a new clone, each worker but the first begins with another part of the test modules, so that none
    compiles all of them: those of the first part have been compiled by the first worker when they are needed.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root, number, count = session.config.rootpath, int(worker["workerid"][2:]), worker["workercount"]
    modules = sorted((root / "tests").rglob("test_*.py"))
    begin, end = (len(modules) * index // count for index in (number, number + 1))
    for path in modules[begin:end] if number else ():
        if not any(path.parent.glob(f"__pycache__/{path.stem}.*")):
            with suppress(Exception, pytest.skip.Exception):  # reported when it is collected
                import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.fixture(scope="session")
def scaled(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """A number of cases -> how many of them to run."""
    share: float = request.config.getoption("--attack-share")
    return lambda cases: max(1, round(cases * share))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cases that `default_cases` excludes from the default tier. Without `--attack-share 1`,
    leave out those that add no parameter value and no pair of them, and those of `every_case`.
    """
    cases: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if (
            item.get_closest_marker("default_cases")
            and isinstance(item, pytest.Function)
            and not _is_skipped(item)
        ):
            cases[item.nodeid.partition("[")[0]].append(item)
    for functions in cases.values():
        _mark(functions)
    if config.getoption("--attack-share") < 1:
        excluded = {item for item in items if item.get_closest_marker("every_case")}
        config.hook.pytest_deselected(items=list(excluded))
        items[:] = [item for item in items if item not in excluded]


def _mark(functions: Sequence[pytest.Function]) -> None:
    """Mark the cases of one test as slow or as not needed."""
    marker = functions[0].get_closest_marker("default_cases")
    assert marker is not None
    limited = [function for function in functions if not function.get_closest_marker("slow")]
    selected = default_cases([_parameters(function) for function in limited], *marker.args)
    default = {id(limited[index]) for index in selected}
    pairs = [values_and_pairs(_parameters(function)) for function in functions]
    begin = {index for index, function in enumerate(functions) if id(function) in default}
    needed = covering(pairs, begin)
    for index, function in enumerate(functions):
        if id(function) not in default:
            function.add_marker(pytest.mark.slow)
        if index not in needed:
            function.add_marker(pytest.mark.every_case)


def _is_skipped(item: pytest.Item) -> bool:
    """Whether a `skipif` of the test holds."""
    return any(marker.args[0] is True for marker in item.iter_markers("skipif"))


def _parameters(function: pytest.Function) -> set[tuple[str, str]]:
    """(name, value) of each parameter of a test case."""
    params = function.callspec.params if hasattr(function, "callspec") else {}
    return {(name, repr(value)) for name, value in params.items()}


def default_cases(cases: Sequence[set[tuple[str, str]]], count: int | None = None) -> set[int]:
    """Indices of at most `count` cases which together have as many parameter values as possible.

    `count` None: as few as have every value.
    """
    values = set[tuple[str, str]]().union(*cases)
    missing, selected = set(values), set[int]()
    while len(selected) < len(cases) and (
        missing or not selected if count is None else len(selected) < count
    ):
        missing = missing or set(values)
        best = _best(cases, selected, missing)
        selected.add(best)
        missing -= cases[best]
    return selected


def values_and_pairs(case: set[tuple[str, str]]) -> set[tuple[tuple[str, str], ...]]:
    """Each value of a case's parameters, and each pair of them."""
    return {(value,) for value in case} | set(combinations(sorted(case), 2))


def covering(cases: Sequence[Set[Any]], given: set[int]) -> set[int]:
    """Indices of the cases `given`, and of as few others as have what these lack."""
    selected = set(given)
    missing = set[Any]().union(*cases).difference(*(cases[index] for index in given))
    while missing:
        best = _best(cases, selected, missing)
        selected.add(best)
        missing -= cases[best]
    return selected


def _best(cases: Sequence[Set[Any]], selected: set[int], missing: Set[Any]) -> int:
    others = [index for index in range(len(cases)) if index not in selected]
    return max(others, key=lambda index: len(cases[index] & missing))


def pytest_collection_finish() -> None:
    """Modules and tests live until the process ends, so the collector need not examine them."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """What is garbage is reported now. pytest examines five times at the end what is left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_data_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A profile, a chat or a model of the user must not change a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_figures_of_the_user(shared_folder: Path) -> Iterator[None]:
    """What was measured of the user's drafts must not change a test, nor the other way round. The costs of a
    model's drafts are measured once for all workers.
    """
    from edgeinfer.loading import loading
    from edgeinfer_offload.machine.measure import stored_draft_figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "stored_draft_figures", lambda _: stored_draft_figures(shared_folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _build_kernels_once(request: pytest.FixtureRequest) -> None:
    """Builds the kernels of this tier before any test loads a model: each build starts a compiler."""
    items = request.session.items
    if any(BY_KERNELS.intersection(getattr(item, "fixturenames", ())) for item in items):
        from tests.kernels.conftest import build_all

        build_all(slow=any(item.get_closest_marker("slow") for item in items))


@pytest.fixture(scope="session", autouse=True)
def _default_sigint() -> Iterator[None]:
    """The tests and the programs that they start handle Ctrl-C, even where a shell runs the tests in the
    background.

    Such a shell has its children ignore the signal, and theirs inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages of the log. pytest's plugin for logs is off: it takes half a millisecond of each test."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    yield messages
    root.removeHandler(handler)


@pytest.fixture
def anyio_backend() -> str:
    """Textual and the server run on asyncio."""
    return "asyncio"

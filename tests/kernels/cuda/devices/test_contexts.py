"""The primary context of a GPU is created with small stacks and long reads, if the process has none."""

from typing import Any

import pytest

from edgeinfer_kernels.cuda.driver import FETCHED_BYTES, STACK_BYTES, create_context_of

FAILED = 2


class Library:
    """Records the calls of a driver; `active`: the process has a context; `failing` fails."""

    def __init__(self, *, active: bool = False, failing: str = "") -> None:
        self.active, self.failing = active, failing
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuDevicePrimaryCtxGetState":
                arguments[2].contents.value = int(self.active)
            return FAILED if name == self.failing else 0

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_a_new_context_has_small_stacks_and_long_reads_and_is_not_left_current() -> None:
    library = Library()
    create_context_of(library, 1)
    assert library.calls[0][1][1] == 1
    limits = [arguments for name, arguments in library.calls if name == "cuCtxSetLimit"]
    assert {kind: limit.value for kind, limit in limits} == {0: STACK_BYTES, 5: FETCHED_BYTES}
    set_limits = ["cuCtxSetLimit", "cuCtxSetLimit"]
    assert library.names[-4:] == ["cuCtxPushCurrent_v2", *set_limits, "cuCtxPopCurrent_v2"]


def test_the_context_of_a_program_that_uses_the_gpu_already_is_left_as_it_is() -> None:
    library = Library(active=True)
    create_context_of(library, 0)
    assert library.names == ["cuDeviceGet", "cuDevicePrimaryCtxGetState"]


@pytest.mark.parametrize(
    "failing",
    ["cuDeviceGet", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"],
)
def test_a_call_that_fails_ends_it(failing: str) -> None:
    library = Library(failing=failing)
    create_context_of(library, 0)
    assert library.names[-1] == failing

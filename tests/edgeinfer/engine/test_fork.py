"""A model in a forked child: separate memory, threads and locks; on a GPU one clear error."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import EdgeInferError
from edgeinfer.structured.helper_thread import HelperThread
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.system.locks import fork_safe_lock
from tests.edgeinfer.conftest import ZooFile

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
PROMPTS = [[1, 5, 6, 7, 8], [1, 9, 10, 11]]
CHILD_SECONDS = 60


def begin_child(work: Callable[[], bytes]) -> Callable[[], bytes]:
    """Run a function in a forked child; returns a function that waits for its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            import signal

            signal.alarm(CHILD_SECONDS)  # a hang becomes a failure
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)

    def result() -> bytes:
        with os.fdopen(reading, "rb") as pipe:
            actual = pipe.read()
        os.waitpid(child, 0)
        return actual

    return result


def completion_text(model: Model, prompt: list[int]) -> bytes:
    result = model.generate(prompt, max_tokens=60, temperature=0).ids
    return np.array(result, np.int64).tobytes()


@pytest.mark.parametrize("nbytes", [100, 5 << 20])
def test_a_forked_child_writes_into_separate_memory(nbytes: int) -> None:
    memory = allocate(nbytes)

    def work() -> bytes:
        memory[:] = 7
        return b"done"

    assert begin_child(work)() == b"done"
    assert not memory.any()


@pytest.mark.slow
def test_parent_and_child_generate_at_the_same_time(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=2, draft=None) as model:
        alone = [completion_text(model, prompt) for prompt in PROMPTS]
        for _ in range(5):
            of_child = begin_child(lambda: completion_text(model, PROMPTS[1]))
            assert completion_text(model, PROMPTS[0]) == alone[0]
            assert of_child() == alone[1]


@pytest.mark.slow
def test_a_child_of_a_parent_that_is_generating_works(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=2, draft=None) as model:
        alone = [completion_text(model, prompt) for prompt in PROMPTS]
        stop = threading.Event()

        def generate() -> None:
            while not stop.is_set():
                completion_text(model, PROMPTS[0])

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            result = [begin_child(lambda: completion_text(model, PROMPTS[1]))() for _ in range(5)]
        finally:
            stop.set()
            thread.join()
        assert result == [alone[1]] * 5


def test_a_held_lock_is_free_in_a_forked_child() -> None:
    lock = fork_safe_lock()
    with lock:
        assert begin_child(lambda: str(lock.acquire(timeout=10)).encode())() == b"True"
        assert lock.locked()


def test_a_helper_thread_is_started_again_in_a_child() -> None:
    helper = HelperThread("helper")
    assert helper.do(lambda: 3).result() == 3
    assert begin_child(lambda: str(helper.do(lambda: 4).result()).encode())() == b"4"


def test_a_forked_child_of_a_gpu_model_gets_an_error(
    zoo_file: ZooFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=1, draft=None) as model:
        loaded = model.engine
        assert isinstance(loaded, NativeEngine)
        monkeypatch.setattr(loaded.backend, "capabilities", Capabilities())
        engine = NativeEngine(loaded.specification, loaded.backend, loaded.context, loaded.batch)

        def work() -> bytes:
            try:
                engine.append(PROMPTS[0])
            except EdgeInferError as error:
                return str(error).encode()
            return b""

        assert begin_child(work)().startswith(
            b"a forked child cannot use the GPU of its parent: load the model"
        )
        assert completion_text(model, PROMPTS[0])


def test_a_stream_continues_in_a_forked_child(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=1, draft=None) as model:
        alone = model.generate(PROMPTS[1], max_tokens=20, temperature=0).ids
        stream, other = (model.stream(prompt, max_tokens=20, temperature=0) for prompt in reversed(PROMPTS))
        ids = [next(stream).id for _ in range(4)]
        next(other)

        def work() -> bytes:
            return np.array([*ids, *(token.id for token in stream)], np.int64).tobytes()

        assert np.frombuffer(begin_child(work)(), np.int64).tolist() == alone
        assert [*ids, *(token.id for token in stream)] == alone

"""Items of several asynchronous generators: as they come; the first error ends the others."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from edgeinfer.serving.completion.interleaving import interleaved

pytestmark = pytest.mark.anyio


class Source:
    """Counts to a number, which may be an error; records whether it was closed."""

    def __init__(self, name: str, count: int, error: Exception | None = None) -> None:
        self.name, self.count, self.error, self.taken, self.closed = name, count, error, 0, False

    async def items(self) -> AsyncGenerator[str, None]:
        try:
            for index in range(self.count):
                await asyncio.sleep(0)
                self.taken += 1
                yield f"{self.name}{index}"
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def test_sources_alternate_and_each_keeps_the_order() -> None:
    sources = [Source("a", 4), Source("b", 4), Source("c", 1)]
    found = [item async for item in interleaved([each.items() for each in sources])]
    assert sorted(found) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "c0"]
    assert [item for item in found if item[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert found.index("b0") < found.index("a3")
    assert all(each.closed for each in sources)


async def test_the_first_error_ends_all_sources() -> None:
    sources = [Source("a", 1000), Source("b", 2, ValueError("b is full"))]
    with pytest.raises(ValueError, match="b is full"):
        async for _ in interleaved([each.items() for each in sources]):
            pass
    assert all(each.closed for each in sources)
    assert sources[0].taken < 20


@pytest.mark.parametrize("count", [1, 3])
async def test_a_reader_that_leaves_closes_all_sources(count: int) -> None:
    sources = [Source(str(index), 1000) for index in range(count)]
    reader = interleaved([each.items() for each in sources])
    await anext(reader)
    await reader.aclose()
    assert all(each.closed for each in sources)
    assert max(each.taken for each in sources) < 5

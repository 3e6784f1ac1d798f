import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for a module's tests: what they start on it may live from one test to the next."""
    with asyncio.Runner() as runner:
        yield runner

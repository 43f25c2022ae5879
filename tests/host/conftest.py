"""Servers that host tests share; each is one process for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from speed_tier.tests.host.server import HostServer

HERE = Path(__file__).parent
pytest.register_assert_rewrite("speed_tier.tests.host.self_check_cases")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.host)


@pytest.fixture(scope="session")
def server() -> Iterator[HostServer]:
    """A host with the pack; tests must not depend on what an earlier one left loaded."""
    with HostServer(tag="pack") as running:
        yield running


@pytest.fixture(scope="session")
def bare_server() -> Iterator[HostServer]:
    """The same host without the pack: its bytes are what `off` must give."""
    with HostServer(with_pack=False, tag="bare") as running:
        yield running

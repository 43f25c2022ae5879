"""One host and one Chromium for the whole session, one page for each node renderer.

SPEED_TIER_TEST_FRONTEND=/path/to/comfyui_frontend_package/static tests another frontend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from speed_tier.tests.browser.page import ComfyPage, chromium
from speed_tier.tests.host.server import HostServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def server() -> Iterator[HostServer]:
    packs = {"speed_tier_eager_compile": HERE / "eager_compile"}
    # The host's own attention on a CPU breaks every graph.
    args: tuple[str, ...] = ("--use-pytorch-cross-attention",)
    if frontend := os.environ.get("SPEED_TIER_TEST_FRONTEND"):
        args += ("--front-end-root", frontend)
    with HostServer(tag="browser", custom_nodes=packs, extra_args=args) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="session", params=[False, True], ids=["canvas", "nodes2"])
def page(
    request: pytest.FixtureRequest, browser: Browser, server: HostServer
) -> Iterator[ComfyPage]:
    opened = ComfyPage(browser, server, nodes2=request.param)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def console_gate(page: ComfyPage) -> Iterator[None]:
    """Nothing we do may make the page complain."""
    yield
    assert page.complaints() == []

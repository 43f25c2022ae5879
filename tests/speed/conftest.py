"""What the engine's tests share. Keeps torch's structured trace, thousands of empty lines, out of
what a failure shows."""

import logging

import pytest
from speed_tier.speed.patching import active_patches
from speed_tier.tests.speed.process import full_state

logging.getLogger("torch.__trace").propagate = False


@pytest.fixture
def process_as_found():
    """Process-wide settings are what they were, and nothing is left patched."""
    before = full_state()
    yield
    assert full_state() == before
    assert active_patches() == 0

"""A model's graphs, on a device that a test controls."""

import pytest
from speed_tier.speed.optimizations.graph_capture import GraphCapture, GraphConfig
from speed_tier.tests.speed.optimizations.recording import Recorder


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def graphs(recorder):
    return GraphCapture(GraphConfig(recorder=recorder))

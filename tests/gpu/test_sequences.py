"""Nothing that people do to a run changes a later one: on a real card, under both allocators."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..host.provision import find_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "native"])
def test_random_sequences(allocator):
    script = Path(__file__).with_name("sequences.py")
    command = [sys.executable, str(script), str(find_host()), "--count", "200"]
    done = subprocess.run(
        [*command, "--allocator", allocator], capture_output=True, text=True, check=False
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["wrong"] == []
    assert facts["seen"]["captured"] > 20 and facts["seen"]["replayed"] > 100

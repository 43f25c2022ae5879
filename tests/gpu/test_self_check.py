"""The self-check finds what is planted and passes what is right, on a real card."""

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


def test_planted_faults_and_clean_runs():
    script = Path(__file__).with_name("self_check.py")
    command = [sys.executable, str(script), str(find_host())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["wrong"] == []
    assert facts["compared"] > 25  # of 32 clean runs, some of a size seen before

"""Every type and every oddity of public GGUF files, through the loader, on a real host."""

from pathlib import Path

import pytest
from speed_tier.speed.kernels import QUANT_TYPES
from speed_tier.tests.host.provision import lines_of

SCRIPT = Path(__file__).with_name("gguf_every_type.py")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Facts of each file, by family and whether it is an odd one."""
    folder = tmp_path_factory.mktemp("gguf")
    rows = lines_of(
        SCRIPT,
        str(folder),
        first_key="family",
        timeout_s=500,
        environment={"OMP_NUM_THREADS": "1"},
    )
    return {(row["family"], row["odd"]): row for row in rows}


@pytest.mark.parametrize("odd", [False, True], ids=["usual", "odd"])
@pytest.mark.parametrize("family", ["zimage", "qwen"])
def test_every_weight_is_what_the_gguf_package_reads(loaded, family, odd):
    row = loaded[family, odd]
    assert row["wrong"] == []
    assert row["plain"] > 20
    # Plain float types are no packed weights; every other type is among the packed ones.
    expected = {r.name for r in QUANT_TYPES if not r.plain}
    missing = expected - set(row["types"])
    assert not missing, missing


@pytest.mark.parametrize("family", ["zimage", "qwen"])
def test_the_host_counts_the_stored_bytes(loaded, family):
    row = loaded[family, False]
    unused = 4 * 3840  # a parameter that 0.3.75 builds for Z-Image
    assert 0 <= row["size"] - row["bytes"] <= unused

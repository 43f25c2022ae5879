"""The torch reference of every type against the gguf package."""

import pytest
import torch
from speed_tier.speed.kernels import QUANT_TYPES
from speed_tier.tests.speed.kernels import cases


@pytest.mark.parametrize("content", cases.CONTENTS)
@pytest.mark.parametrize("name", [row.name for row in QUANT_TYPES])
def test_reference_matches_gguf(name, content):
    cases.check_path(name, "reference", content, 7, 768)


@pytest.mark.parametrize("row", QUANT_TYPES, ids=lambda row: row.name)
def test_sizes_are_gguf_sizes(row):
    assert cases.gguf_sizes(row) == (row.block_size, row.type_size)


def test_every_type_gguf_can_dequantise_has_a_row():
    import gguf

    known = {int(t) for t in gguf.quants._type_traits} | {0, 1}
    assert known == {row.id for row in QUANT_TYPES}


def test_reference_makes_no_constant_on_the_device():
    """A constant would be copied to the device, and waited for, on every call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoFactories(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "lift_fresh" not in str(func), "a constant tensor is made on every call"
            return func(*args, **(kwargs or {}))

    for row in QUANT_TYPES:
        blocks = torch.from_numpy(cases.packed(row.name, "random", 4))
        table = None
        if row.has_table:
            from speed_tier.speed.kernels.dispatch import table_for

            table = table_for(row.name, torch.device("cpu"))
        with NoFactories():
            row.reference(blocks, table) if table is not None else row.reference(blocks)

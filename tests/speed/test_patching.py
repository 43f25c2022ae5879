"""Patches on objects we do not own: in, out, and exactly what was there before."""

import threading

import pytest
import torch
from speed_tier.speed.patching import (
    GradOff,
    Patch,
    PatchSet,
    active_patches,
    beneath,
    body_drift,
    foreign,
    is_replaced,
    point_at,
    signature_drift,
)
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, scale=1.0):
        return x * self.weight * scale


def doubled(x, scale=1.0):
    return x * 2


def tripled(x, scale=1.0):
    return x * 3


ONE = torch.ones(2)


@pytest.fixture(autouse=True)
def no_patch_is_left():
    yield
    assert active_patches() == 0


def value(block):
    return float(block(ONE)[0].detach())


def test_in_and_out_where_the_instance_had_nothing():
    block = Block()
    before = dict(vars(block))
    with PatchSet([Patch(block, "forward", doubled)]):
        assert value(block) == 2
        assert active_patches() == 1
    assert vars(block) == before
    assert "forward" not in vars(block)
    assert value(block) == 1


def test_in_and_out_where_the_instance_had_its_own():
    block = Block()
    block.forward = tripled
    with PatchSet([Patch(block, "forward", doubled)]):
        assert value(block) == 2
    assert vars(block)["forward"] is tripled
    assert value(block) == 3


def test_names_and_parameters_stay_visible_while_patched():
    block = nn.Sequential(Block(), Block())
    keys = list(block.state_dict())
    with PatchSet([Patch(block[0], "forward", doubled), Patch(block[1], "forward", doubled)]):
        assert list(block.state_dict()) == keys
        assert dict(block.named_modules()).keys() == {"", "0", "1"}


def test_the_same_set_twice_is_one_patch_with_two_holders():
    block = Block()
    patches = PatchSet([Patch(block, "forward", doubled)])
    assert len(patches) == 1
    with patches:
        with patches:
            assert active_patches() == 1
        assert value(block) == 2
    assert "forward" not in vars(block)


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_overlapping_sets_leave_in_either_order(first_out):
    block = Block()
    sets = [PatchSet([Patch(block, "forward", f)]) for f in (doubled, tripled)]
    for patches in sets:
        patches.__enter__()
    assert value(block) == 3
    sets[first_out].__exit__()
    assert value(block) == (3 if first_out == 0 else 2), "the one that stays decides"
    sets[1 - first_out].__exit__()
    assert "forward" not in vars(block)


@pytest.mark.parametrize("theirs", [None, tripled])
def test_what_is_beneath_a_patch(theirs):
    block, last = Block(), lambda x: x
    if theirs is not None:
        block.forward = theirs
    assert foreign(block, "forward") is theirs
    with PatchSet([Patch(block, "forward", doubled), Patch(block, "forward", last)]):
        assert beneath(block, "forward", last) is doubled
        assert beneath(block, "forward", doubled) is theirs
        assert foreign(block, "forward") is theirs
    assert beneath(block, "forward", doubled) is None


def test_one_attribute_in_two_patches_of_a_set():
    block = Block()
    with PatchSet([Patch(block, "forward", doubled), Patch(block, "forward", tripled)]):
        assert value(block) == 3
    assert "forward" not in vars(block)


def test_an_exception_in_the_call_takes_everything_out():
    block = Block()
    with (
        pytest.raises(ZeroDivisionError),
        PatchSet([Patch(block, "forward", lambda x: 1 / 0)]),
    ):
        block(ONE)
    assert "forward" not in vars(block)


def test_a_set_that_fails_to_enter_leaves_nothing():
    block = Block()
    without_attributes = object()
    with pytest.raises(TypeError):
        PatchSet(
            [Patch(block, "forward", doubled), Patch(without_attributes, "forward", doubled)]
        ).__enter__()
    assert "forward" not in vars(block)
    assert value(block) == 1


def test_a_storm_of_threads_leaves_the_original():
    blocks = [Block() for _ in range(4)]
    start = threading.Barrier(8)
    wrong = []

    def work(number):
        mine = [lambda x, n=number: x * n for _ in blocks]
        patches = PatchSet([Patch(b, "forward", f) for b, f in zip(blocks, mine, strict=True)])
        start.wait()
        for _ in range(100):
            with patches:
                if value(blocks[0]) < 2:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "the block ran unpatched while somebody held the patch"
    assert all("forward" not in vars(block) for block in blocks)


def test_a_foreign_attribute_counts_as_replaced():
    block = Block()
    assert not is_replaced(block, "forward")
    block.forward = doubled
    assert is_replaced(block, "forward")
    with PatchSet([Patch(block, "forward", tripled)]):
        assert is_replaced(block, "forward"), "ours hides a foreign one"
    assert is_replaced(block, "forward")


def test_our_own_patch_does_not_count_as_replaced():
    block = Block()
    with PatchSet([Patch(block, "forward", doubled)]):
        assert not is_replaced(block, "forward")


def test_the_own_method_left_bound_behind_is_not_foreign():
    """What the host's ejected bypass LoRA and unpatched object patches leave."""
    block = Block()
    block.forward = block.forward
    assert "forward" in vars(block)
    assert not is_replaced(block, "forward")
    left = vars(block)["forward"]
    with PatchSet([Patch(block, "forward", doubled)]):
        assert not is_replaced(block, "forward")
    assert vars(block)["forward"] is left
    block.forward = Block().forward  # another instance's method runs with another self
    assert is_replaced(block, "forward")


def test_signature_drift_names_both_signatures():
    assert signature_drift(Block.forward, ("x",)) is None
    assert signature_drift(Block.forward, ("x", "scale")) is None
    assert signature_drift(Block().forward, ("x", "scale")) is None
    drift = signature_drift(Block.forward, ("x", "mask"))
    assert drift == "Block.forward takes (x, scale), the patch was written for (x, mask)"
    assert signature_drift(torch._C._nn.gelu, ("x",)).endswith("has no readable signature")


def test_body_drift_names_the_missing_line():
    assert body_drift(Block.forward, ["x * self.weight"]) is None
    assert body_drift(Block.forward, ["x*self.weight  *  scale"]) is None, "blanks do not count"
    drift = body_drift(Block.forward, ["x * self.weight", "x + bias"])
    assert drift == "Block.forward no longer contains 'x + bias'"
    assert body_drift(torch.add, ["x"]).endswith("has no readable source")


def test_point_at_keeps_the_parameter_object():
    block = Block()
    parameter = block.weight
    shared = torch.full((4,), 5.0)
    point_at(block.weight, shared[1:3])
    assert block.weight is parameter
    assert block.weight.data_ptr() == shared[1:].data_ptr()


def test_grad_off_restores_only_what_was_on():
    on, off = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    grad = GradOff([on, off])
    assert not on.requires_grad
    assert not off.requires_grad
    grad.remove()
    assert on.requires_grad
    assert not off.requires_grad
    on.requires_grad_(False)
    grad.remove()
    assert not on.requires_grad, "removed twice"


def test_grad_off_on_inference_tensors():
    """The host makes its parameters in inference mode; they take requires_grad only there."""
    with torch.inference_mode():
        parameter = nn.Parameter(torch.ones(1))
        parameter.requires_grad_(True)
        assert parameter.is_inference()
        grad = GradOff([parameter])
        assert not parameter.requires_grad
    grad.remove()
    assert parameter.requires_grad


def test_grad_off_outside_inference_mode_on_an_inference_tensor():
    with torch.inference_mode():
        parameter = nn.Parameter(torch.ones(1))
        parameter.requires_grad_(True)
    grad = GradOff([parameter])
    assert not parameter.requires_grad
    grad.remove()
    assert parameter.requires_grad


def test_grad_off_keeps_no_parameter_alive():
    block = Block()
    grad = GradOff(block.parameters())
    block.weight = nn.Parameter(torch.zeros(2), requires_grad=False)  # a merged LoRA swaps it
    grad.remove()
    assert not block.weight.requires_grad

"""Files under a safetensors name: whole ones pass, others get one sentence."""

import pytest
import torch
from safetensors.torch import save_file
from speed_tier.speed.errors import SpeedTierError
from speed_tier.speed.hosts.safetensors_check import refuse_broken


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "whole.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(0)}, path, {"format": "pt"})
    return path


def test_a_whole_file_passes_and_so_does_any_other_name(whole, tmp_path):
    assert refuse_broken(str(whole)) is None
    other = tmp_path / "old.ckpt"
    other.write_bytes(b"GGUF")
    assert refuse_broken(str(other)) is None


def test_a_file_that_is_cut_off_anywhere(whole):
    content = whole.read_bytes()
    for end in range(len(content)):
        whole.write_bytes(content[:end])
        with pytest.raises(SpeedTierError, match=r"whole.safetensors is .*Download it again") as e:
            refuse_broken(str(whole))
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (b"<!DOCTYPE html><html>", r"is not a safetensors file; found '<!DOCTYPE ' at the start"),
        (b"GGUF\3\0\0\0" + bytes(99), r"is a GGUF file .* to end in \.gguf\. Rename it"),
        (b"\2" + bytes(7) + b"[]", "is not a safetensors file"),
        (b"\x09" + bytes(7) + b'{"a": {}}', "expected a whole header"),
        (b"\xff" * 8 + b"{", "expected a whole header, found 9 bytes"),
    ],
)
def test_something_else_under_that_name(tmp_path, content, phrase):
    path = tmp_path / "x.SafeTensors"
    path.write_bytes(content)
    with pytest.raises(SpeedTierError, match=phrase):
        refuse_broken(str(path))

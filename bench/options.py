"""The options that every benchmark with a real host takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

FAMILIES = ("z_image", "qwen_image")
TINY = {
    "layers": 2,
    "sizes": [64],
    "steps": 3,
    "host_args": ["--cpu", "--use-pytorch-cross-attention"],
}


def words(text: str) -> list[str]:
    """Parts of an option between commas."""
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in words(text)]


def host_parser(
    description: str | None, results: Path, families: Sequence[str] = FAMILIES
) -> argparse.ArgumentParser:
    """Where the host is and how it starts, what is measured on it, and where the rows go."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--comfy", required=True, help="a ComfyUI checkout")
    parser.add_argument("--families", default=list(families), type=words)
    parser.add_argument("--sizes", default=[1024, 512], type=_numbers)
    parser.add_argument("--allocator", default="cudaMallocAsync")
    parser.add_argument("--host-args", default=[], type=str.split, help="of the host's main.py")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=results)
    return parser


def model_parser(description: str | None, results: Path) -> argparse.ArgumentParser:
    """The same for a benchmark that samples with whole models; for `parsed_model_options`."""
    parser = host_parser(description, results)
    parser.add_argument("--steps", default=8, type=int, help="3 or more")
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--tiny", action="store_true", help="2 layers, 64 px, 3 steps, on the CPU")
    return parser


def parsed_model_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """This process's options, with what --tiny stands for and the host as an absolute path."""
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(TINY)
    options.comfy = str(Path(options.comfy).resolve())
    return options

"""GGUF files through the loader node of a real server, on CPU, beside dense files of equal weights.

Real widths and the mix of types that people download (gguf_files.py); few steps at 64 pixels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from speed_tier.tests.host.gguf_files import file_name, gguf_files
from speed_tier.tests.host.graphs import TEXT_WIDTH, Graph, tiny_run
from speed_tier.tests.host.model_files import qwen_weights
from speed_tier.tests.host.provision import find_host, host_version
from speed_tier.tests.host.server import HostServer, PromptResult
from speed_tier.tests.host.tier_cases import ARGS, engaged
from speed_tier.tests.speed.gguf import packer

# Both in fp32: LoRA beside a weight is rounded otherwise than LoRA in it, and compiled code
# otherwise than eager. What a LoRA changes is ten thousand times as much.
NEAR, FAR = 1e-5, 0.05
LOADED = "loaded completely"  # the host's line for each load
COMPILED = {"gguf_dequant": "on", "regional_compile": "on"}


# ---- files that must be refused ----


def _small(path: Path, **metadata: Any) -> None:
    plan = packer.mixed(packer.z_image(), "Q4_K_M", 2)
    packer.write(path, plan, "lumina2", metadata)


def _truncated(path: Path) -> None:
    _small(path)
    os.truncate(path, path.stat().st_size - 5000)


def _split(path: Path) -> None:
    _small(path, **{"split.no": 0, "split.count": 3})


def _text_encoder(path: Path) -> None:
    plan = [("token_embd.weight", (64, 256), Q.Q8_0), ("blk.0.attn_q.weight", (256, 256), Q.Q4_K)]
    packer.write(path, plan, "qwen3")


def _hollow(path: Path, table: list[tuple[str, tuple[int, ...]]]) -> None:
    """Qwen-Image of real width, all zeros: a hole, not bytes on the disk."""
    writer = gguf.GGUFWriter(path, "qwen_image")
    size = 0
    for name, shape, qtype in packer.mixed(table, "Q4_0", 1):
        block_size, type_size = gguf.GGML_QUANT_SIZES[qtype]
        stored = (*shape[:-1], shape[-1] // block_size * type_size)
        n_bytes = int(numpy.prod(stored))
        writer.add_tensor_info(name, stored, numpy.dtype(numpy.uint8), n_bytes, qtype)
        size += writer.ggml_pad(n_bytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = writer.ggml_pad(path.stat().st_size, writer.data_alignment)
    os.truncate(path, start + size)


def _qwen_table() -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        return [(name, tuple(weight.shape)) for name, weight in qwen_weights(layers=1).items()]


def _layered(path: Path) -> None:
    """Qwen-Image Layered, which 0.3.75 does not know."""
    extra = ("time_text_embed.addition_t_embedding.weight", (2, 3072))
    _hollow(path, [*_qwen_table(), extra])


def _without_a_linear(path: Path) -> None:
    stem = "transformer_blocks.0.img_mlp.net.2."
    _hollow(path, [row for row in _qwen_table() if not row[0].startswith(stem)])


# What each file is, how it is made, and what its sentence must say.
BAD: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated": (_truncated, ("is incomplete or damaged; expected", "Download it again.")),
    "web page": (
        lambda path: path.write_text("<!DOCTYPE html><html><title>Sign in</title></html>"),
        ("is a web page, not a GGUF file", "Use the download link of the file"),
    ),
    "two bytes": (
        lambda path: path.write_bytes(b"GG"),
        ("is too short for a GGUF file; found 2 bytes", "Download it again."),
    ),
    "text encoder": (
        _text_encoder,
        ("is no Z-Image or Qwen-Image transformer; found a text encoder", "CLIP loader"),
    ),
    "split part": (_split, ("is part 1 of 3 of a split model", "llama-gguf-split --merge")),
    "without a linear": (
        _without_a_linear,
        ("lacks 2 tensors that the model needs (first 'transformer_blocks.0.img_mlp.net.2.bias')",),
    ),
    "cut off safetensors": (
        lambda path: path.write_bytes(b"\x40" + bytes(7) + b'{"a": '),
        ("is damaged or incomplete; expected", "Download it again."),
    ),
    "other width": (
        _small,
        ("does not fit the model that this ComfyUI builds for it", "Update ComfyUI"),
    ),
}
LAYERED = "layered"


def bad_name(kind: str) -> str:
    ending = "" if kind.endswith("safetensors") else ".gguf"
    return f"bad_{kind.replace(' ', '_').replace('_safetensors', '.safetensors')}{ending}"


# ---- one server, every prompt once ----


@dataclass(frozen=True)
class Shot:
    """What one prompt gave.

    Attributes:
        latents: The sampler's output; `digest` is the hash of its bytes.
        report: The run's report, or the sentence why there is none.
        loads: How often the host loaded a model.
        reporters: Ids of the nodes that events named.
    """

    latents: torch.Tensor
    digest: str
    report: dict[str, Any]
    loads: int
    reporters: set[str]

    def apart(self, other: Shot) -> float:
        mine, theirs = self.latents.double(), other.latents.double()
        return float((mine - theirs).norm() / theirs.norm())

    def note(self, feature: str) -> str:
        return str(next(f["note"] for f in self.report["features"] if f["name"] == feature))


class Camera:
    """Queues graphs that differ in loader, tier and LoRA, and in nothing else."""

    def __init__(self, server: HostServer, family: str) -> None:
        self.server, self.family = server, family
        self.shots: dict[str, Shot] = {}

    def take(
        self,
        name: str,
        loader: str,
        tier: str | None = None,
        lora: tuple[str, float] | None = None,
        compiled: bool = False,
    ) -> Shot:
        """One prompt. `loader` is a tier of ours, or "twin" for the stock loader."""
        graph = Graph()
        if loader == "twin":
            inputs = {"unet_name": file_name(f"{self.family} twin"), "weight_dtype": "default"}
            model = graph.add("UNETLoader", "loader", **inputs)
        else:
            inputs = {"model_name": file_name(f"{self.family} gguf"), "tier": loader}
            model = graph.add("SpeedTierLoader", "loader", weight_dtype="default", **inputs)
        model = graph.add("TestTrack", "track", model=model, label=loader)
        if lora is not None:
            inputs = {"lora_name": file_name(f"{self.family} {lora[0]}"), "strength_model": lora[1]}
            model = graph.add("LoraLoaderModelOnly", "lora", model=model, **inputs)
        if tier is not None and compiled:
            model = graph.speed_tier_advanced(model, tier, "tier", **COMPILED)
        elif tier is not None:
            model = graph.speed_tier(model, tier, "tier")
        latent = graph.sample(model, dim=TEXT_WIDTH[self.family], steps=1, node_id="sampler")
        latent = graph.add("SpeedTierReport", "report", value=latent)
        graph.sink(latent, f"{self.family} {name}", node_id="sink")
        log, mark = len(self.server.log_text()), self.server.events.mark()
        result = self.server.run(graph.prompt, timeout=600)
        assert "sampler" not in result.cached
        self.shots[name] = Shot(
            torch.from_numpy(numpy.load(result.ui("sink", "file"))),
            result.ui("sink", "sha256"),
            json.loads(result.ui("report", "json")),
            self.server.log_text()[log:].count(LOADED),
            {e.data["node_id"] for e in self.server.events.since(mark, "speed_tier.update")},
        )
        return self.shots[name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    folder = tmp_path_factory.mktemp("bad")
    models = gguf_files()
    makers = {kind: make for kind, (make, _) in BAD.items()}
    for kind, make in {**makers, LAYERED: _layered}.items():
        path = models[f"diffusion_models/{bad_name(kind)}"] = folder / bad_name(kind)
        make(path)
    with HostServer(extra_args=ARGS, models=models, tag="gguf") as running:
        yield running


@pytest.fixture(scope="module")
def start_flags(server: HostServer) -> dict[str, Any]:
    return server.flags()


@pytest.fixture(scope="module")
def zimage(server: HostServer, start_flags: dict[str, Any]) -> dict[str, Shot]:
    camera = Camera(server, "zimage")
    lora, weaker, lokr = ("lora", 1.0), ("lora", 0.5), ("lokr", 1.0)
    camera.take("dense", "twin")
    camera.take("dense, lora", "twin", lora=lora)
    camera.take("dense, weaker", "twin", lora=weaker)
    camera.take("dense, lokr", "twin", lora=lokr)
    camera.take("off", "off")
    camera.take("off, lora", "off", lora=lora)
    camera.take("off, weaker", "off", lora=weaker)
    camera.take("off, lokr", "off", lora=lokr)
    camera.take("off, back", "off")
    camera.take("default", "off", "default")
    camera.take("max", "off", "max", compiled=True)
    camera.take("max, lora", "off", "max", lora=lora, compiled=True)
    camera.take("loader max", "max")
    camera.take("loader max, then off", "max", "off")
    return camera.shots


@pytest.fixture(scope="module")
def qwen(server: HostServer) -> dict[str, Shot]:
    camera = Camera(server, "qwen")
    camera.take("dense", "twin")
    camera.take("dense, lora", "twin", lora=("lora", 1.0))
    camera.take("off", "off")
    camera.take("default, lora", "off", "default", lora=("lora", 1.0))
    return camera.shots


# ---- the picture ----


def test_off_is_the_dense_model_bit_for_bit(zimage: dict[str, Shot]) -> None:
    assert zimage["off"].digest == zimage["dense"].digest
    assert torch.isfinite(zimage["off"].latents).all()
    assert 0.1 < zimage["off"].latents.std() < 100
    assert zimage["off"].report["features"] == []


def test_the_other_family_and_folder(qwen: dict[str, Shot]) -> None:
    assert qwen["off"].digest == qwen["dense"].digest
    tiered = qwen["default, lora"]
    assert tiered.apart(qwen["dense, lora"]) < NEAR < FAR < tiered.apart(qwen["off"])
    assert "gguf_dequant" in engaged(tiered.report)
    # The edge blocks' mix is another one than the inner block's.
    note = tiered.note("gguf_dequant")
    assert all(part in note for part in ("28 Q5_K (", "10 Q4_K (", "4 Q6_K ("))


def test_default_engages_the_dequantisation_by_name(zimage: dict[str, Shot]) -> None:
    assert engaged(zimage["default"].report) == {"gguf_dequant"}
    note = zimage["default"].note("gguf_dequant")
    assert all(part in note for part in ("4 Q4_K (", "1 Q5_K (", "1 Q6_K ("))
    assert zimage["default"].apart(zimage["off"]) < NEAR


def test_max_compiles_packed_blocks(zimage: dict[str, Shot]) -> None:
    report = zimage["max"].report
    assert engaged(report) == {"gguf_dequant", "regional_compile"}
    assert {kind["name"]: kind["compiles"] for kind in report["compile"]["kinds"]} == {
        "context_refiner": 1,
        "noise_refiner": 1,
        "layers": 1,
    }
    assert report["compile"]["graph_breaks"] == {}
    assert zimage["max"].apart(zimage["off"]) < NEAR
    assert zimage["max"].digest != zimage["off"].digest, "nothing was compiled"


def test_off_after_the_loaders_max_is_the_loaders_off(zimage: dict[str, Shot]) -> None:
    assert "gguf_dequant" in engaged(zimage["loader max"].report)
    assert zimage["loader max"].apart(zimage["off"]) < NEAR
    assert zimage["loader max, then off"].digest == zimage["off"].digest
    assert zimage["loader max, then off"].report["tier"]["resolved"] == "off"


def test_the_report_names_the_loader_where_its_tier_is_the_nearest(zimage: dict[str, Shot]) -> None:
    assert zimage["loader max"].report["node_id"] == "loader"
    assert zimage["loader max"].reporters == {"loader"}
    assert zimage["loader max"].report["tier"]["resolved"] == "max"
    assert zimage["loader max, then off"].report["node_id"] == "tier"
    assert zimage["off"].report["node_id"] == "loader"


# ---- LoRA ----


@pytest.mark.parametrize("name", ["lora", "weaker", "lokr"])
def test_a_lora_on_packed_weights_is_that_on_dense_ones(zimage: dict[str, Shot], name: str) -> None:
    packed, dense = zimage[f"off, {name}"], zimage[f"dense, {name}"]
    assert packed.apart(dense) < NEAR < FAR < packed.apart(zimage["off"])


def test_a_lora_in_max(zimage: dict[str, Shot]) -> None:
    assert zimage["max, lora"].apart(zimage["dense, lora"]) < NEAR
    assert engaged(zimage["max, lora"].report) == {"gguf_dequant", "regional_compile"}
    kinds = zimage["max, lora"].report["compile"]["kinds"]
    assert {kind["name"]: kind["compiles"] for kind in kinds} == {
        "context_refiner": 0,
        "noise_refiner": 0,
        "layers": 1,
    }


def test_another_strength_is_another_picture(zimage: dict[str, Shot]) -> None:
    assert zimage["off, lora"].apart(zimage["off, weaker"]) > FAR


def test_without_the_lora_every_byte_is_back(zimage: dict[str, Shot]) -> None:
    assert zimage["off, back"].digest == zimage["off"].digest


def test_a_lora_reloads_nothing(zimage: dict[str, Shot]) -> None:
    """The host takes a dense model off the card and back for each; the same log counts that."""
    dense = [zimage[name].loads for name in ("dense", "dense, lora", "dense, weaker")]
    assert dense == [1, 1, 1]
    assert zimage["off"].loads == 1
    on_packed = ["off, lora", "off, weaker", "off, lokr", "off, back", "default", "max, lora"]
    assert {name: zimage[name].loads for name in on_packed} == dict.fromkeys(on_packed, 0)


# ---- what is left ----


def test_nothing_is_left_when_models_are_unloaded(
    server: HostServer, zimage: dict[str, Shot], start_flags: dict[str, Any]
) -> None:
    Camera(server, "zimage").take("again", "max")
    assert server.flags() == start_flags
    loaded = server.collect()
    assert loaded["alive"]["max"]["module"] == 1
    assert loaded["leftovers"]["max"] == {"shadowed": [], "hooks": [], "wrapped": []}
    server.free(unload_models=True, free_memory=True)
    alive = server.collect()["alive"]
    assert alive["off"] == alive["max"] == {"patcher": 0, "module": 0}
    assert server.flags() == start_flags


# ---- the list of files, and files that are none ----


def test_the_node_lists_both_formats_of_both_folders(server: HostServer) -> None:
    info = server.get("/object_info/SpeedTierLoader")["SpeedTierLoader"]["input"]["required"]
    listed = info["model_name"][0]
    kinds = ("zimage gguf", "zimage twin", "qwen gguf", "qwen twin")
    assert {file_name(kind) for kind in kinds} <= set(listed)
    assert bad_name("truncated") in listed
    assert listed == sorted(listed, key=str.lower)
    stock = server.get("/object_info/UNETLoader")["UNETLoader"]["input"]["required"]
    assert not [name for name in stock["unet_name"][0] if name.endswith(".gguf")]


def load_only(server: HostServer, name: str) -> PromptResult:
    graph = Graph()
    inputs = {"model_name": name, "tier": "default", "weight_dtype": "default"}
    graph.add("TestUnload", "end", model=graph.add("SpeedTierLoader", "loader", **inputs))
    return server.run(graph.prompt, check=False)


def assert_refused(server: HostServer, kind: str, phrases: tuple[str, ...]) -> None:
    error = load_only(server, bad_name(kind)).error
    assert error is not None
    text = error["exception_message"].strip()
    assert error["node_id"] == "loader"
    assert error["exception_type"].endswith(("GGUFFileError", "SpeedTierError"))
    assert all(phrase in text for phrase in (bad_name(kind), *phrases)), text
    assert "\n" not in text
    assert len(text) < 400
    # Nothing is in the way of what comes next.
    assert server.run(tiny_run("zimage", "default", seed=len(kind))).ui("sink", "finite")


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_fails_in_one_plain_sentence(server: HostServer, kind: str) -> None:
    assert_refused(server, kind, BAD[kind][1])


def test_a_variant_that_the_host_does_not_know(server: HostServer) -> None:
    if host_version(find_host()) == "0.3.75":
        assert_refused(server, LAYERED, ("is qwen_image layered", "Update ComfyUI"))
    else:
        assert load_only(server, bad_name(LAYERED)).ok


def test_a_good_file_after_bad_ones(server: HostServer) -> None:
    assert load_only(server, bad_name("two bytes")).error is not None
    assert load_only(server, file_name("qwen gguf")).ok

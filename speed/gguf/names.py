"""What a GGUF file holds, told from its tensor names and shapes, and the names other stacks use.

Metadata is a hint at most: files of these families are tagged `lumina2`, `z_image`, `qwen_image`,
with invented names, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import GGUFFileError

Z_IMAGE, QWEN_IMAGE = "z_image", "qwen_image"
NATIVE, DIFFUSERS = "native", "diffusers"

# Longest first: each is tried on the whole table.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "")
Z_IMAGE_DIM = 3840
QWEN_TEXT_DIM = 3584

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recognised:
    """What the tensors say.

    Attributes:
        family: `z_image` or `qwen_image`.
        naming: `native` (the host's names) or `diffusers`; Qwen-Image's are the same, `native`.
        prefix: what every name starts with.
        variant: `base`, `edit_2511`, `layered` (Qwen-Image), `twinflow`, `omni` (Z-Image).
        notes: sentences for the report.
    """

    family: str
    naming: str
    prefix: str
    variant: str = "base"
    notes: tuple[str, ...] = field(default=())


def recognise(file_name: str, shapes: Shapes, metadata: Mapping[str, Any]) -> Recognised:
    """Tell family, naming, prefix and variant from tensor names and shapes.

    Args:
        file_name: for the messages.
        shapes: logical shape (torch order) by stored name.
        metadata: the file's; only its architecture is read, only for messages.

    Raises:
        GGUFFileError: another kind of model, a format of another engine, or left-over fp8 scales.
    """
    _refuse_other_formats(file_name, shapes)
    for prefix in PREFIXES:
        names = {n[len(prefix) :]: s for n, s in shapes.items() if n.startswith(prefix)}
        found = _z_image(prefix, names) or _qwen_image(prefix, names)
        if found is not None:
            return found
    raise _unknown(file_name, shapes, metadata)


def _z_image(prefix: str, names: Shapes) -> Recognised | None:
    # Tiny models made for tests have other widths; Lumina 2 (2304) has no pad tokens.
    width = (names.get("cap_embedder.1.weight") or (0,))[0]
    if not width or "noise_refiner.0.attention_norm1.weight" not in names:
        return None
    if width != Z_IMAGE_DIM and "cap_pad_token" not in names:
        return None
    split = "layers.0.attention.to_q.weight" in names
    if not split and "layers.0.attention.qkv.weight" not in names:
        return None
    naming = DIFFUSERS if split else NATIVE
    if any(n.startswith("t_embedder_2.") for n in names):
        notes = ("Z-Image with TwinFlow's second time embedder",)
        return Recognised(Z_IMAGE, naming, prefix, "twinflow", notes)
    if any(n.startswith("siglip_embedder.") for n in names):
        notes = ("Z-Image Omni: with an image-feature embedder",)
        return Recognised(Z_IMAGE, naming, prefix, "omni", notes)
    return Recognised(Z_IMAGE, naming, prefix)


def _qwen_image(prefix: str, names: Shapes) -> Recognised | None:
    if "txt_norm.weight" not in names:
        return None
    if "transformer_blocks.0.attn.add_q_proj.weight" not in names:
        return None
    if "time_text_embed.addition_t_embedding.weight" in names:
        return Recognised(
            QWEN_IMAGE, NATIVE, prefix, "layered", ("Qwen-Image Layered: a second time embedding",)
        )
    if "__index_timestep_zero__" in names:
        return Recognised(
            QWEN_IMAGE,
            NATIVE,
            prefix,
            "edit_2511",
            ("Qwen-Image-Edit-2511: reference images at timestep zero",),
        )
    return Recognised(QWEN_IMAGE, NATIVE, prefix)


# Left by fp8 conversions; without their scales the weights mean nothing.
_FP8_MARKS = ("scaled_fp8", ".scale_weight", ".weight_scale", ".scale_input", ".input_scale")
_NUNCHAKU_MARKS = (".qweight", ".wscales", ".wcscales", ".proj_down", ".smooth_factor")


def _refuse_other_formats(file_name: str, names: Iterable[str]) -> None:
    for name in names:
        if name.endswith(_NUNCHAKU_MARKS):
            raise GGUFFileError(
                f"{file_name} holds Nunchaku (SVDQuant) weights in a GGUF file; found tensor "
                f"{name!a}. Use Nunchaku's own loader, or a GGUF of the plain model."
            )
        if name.endswith(_FP8_MARKS):
            raise GGUFFileError(
                f"{file_name} was converted from an fp8 model and still has its scale tensors; "
                f"found {name!a}. Use a GGUF made from the bf16 model: the weights of this "
                "one are wrong without their scales."
            )


_TEXT_ENCODER = re.compile(
    r"(^|\.)(token_embd\.weight|blk\.\d+\.attn_q\.weight|enc\.blk\.\d+\.attn_q\.weight"
    r"|embed_tokens\.weight|layers\.\d+\.self_attn\.q_proj\.weight"
    r"|encoder\.block\.\d+\.layer\.0\.SelfAttention\.q\.weight)$"
)
_VISION = re.compile(r"(^|\.)(v\.blk\.\d+\.|v\.patch_embd\.|mm\.\d+\.)")
_VAE = re.compile(r"(^|\.)(decoder|encoder)\.(conv_in|mid\.|up\.|down\.|upsamples|downsamples)")
_LORA = re.compile(r"(\.|_)(lora_(A|B|up|down)|lokr_w[12]|hada_w[12]_[ab])(\.|$)")
# First tensor names of other image and video models, for a name in the message.
_OTHER_MODELS = (
    ("double_blocks.0.", "Flux or HunyuanVideo"),
    ("joint_blocks.0.", "Stable Diffusion 3"),
    ("input_blocks.0.", "Stable Diffusion 1.5 or XL"),
    ("txt_in.text_norm", "Qwen-Image 2.1"),
    ("blocks.0.cross_attn", "Wan"),
    ("cap_embedder.1.weight", "Lumina 2"),
)


def _unknown(file_name: str, shapes: Shapes, metadata: Mapping[str, Any]) -> GGUFFileError:
    arch = metadata.get("general.architecture")
    tagged = f", tagged {arch!a}" if isinstance(arch, str) else ", with no architecture tag"
    what = None
    if any(map(_TEXT_ENCODER.search, shapes)):
        what, do = "a text encoder", "Load it with the CLIP loader and choose the model file here."
    elif any(map(_VISION.search, shapes)):
        what, do = "a vision projector", "It belongs beside the text encoder."
    elif any(map(_VAE.search, shapes)):
        what, do = "a VAE", "Load it with the VAE loader and choose the model file here."
    elif any(map(_LORA.search, shapes)):
        what, do = "a LoRA", "Load it with a LoRA loader and choose the model file here."
    else:
        do = "Use the loader of that model, or update Speed Tier if the model is newer than it."
        for mark, model in _OTHER_MODELS:
            if any(mark in name for name in shapes):
                what = model
                break
    if not shapes:
        return GGUFFileError(f"{file_name} holds no tensors. Download it again.")
    first = next(iter(shapes))
    found = f"found {what}" if what else f"found {len(shapes)} tensors, first {first!a}"
    return GGUFFileError(
        f"{file_name} is no Z-Image or Qwen-Image transformer; {found}{tagged}. {do}"
    )


# ---- other stacks' names for Z-Image ----

# The one embedder pair (patch 2, frames 1) that both stacks' checkpoints have.
_TO_DIFFUSERS = (
    (re.compile(r"\.attention\.out\."), ".attention.to_out.0."),
    (re.compile(r"\.attention\.q_norm\."), ".attention.norm_q."),
    (re.compile(r"\.attention\.k_norm\."), ".attention.norm_k."),
    (re.compile(r"^x_embedder\."), "all_x_embedder.2-1."),
    (re.compile(r"^final_layer\."), "all_final_layer.2-1."),
)
_TO_NATIVE = (
    (re.compile(r"\.attention\.to_out\.0\."), ".attention.out."),
    (re.compile(r"\.attention\.norm_q\."), ".attention.q_norm."),
    (re.compile(r"\.attention\.norm_k\."), ".attention.k_norm."),
    (re.compile(r"^all_x_embedder\.2-1\."), "x_embedder."),
    (re.compile(r"^all_final_layer\.2-1\."), "final_layer."),
)
FUSED = ".attention.qkv.weight"
SPLIT = (".attention.to_q.weight", ".attention.to_k.weight", ".attention.to_v.weight")


def z_image_name(name: str, naming: str) -> str:
    """A Z-Image tensor's name in `native` or `diffusers` naming; q, k, v are left to the loader."""
    for pattern, text in _TO_DIFFUSERS if naming == DIFFUSERS else _TO_NATIVE:
        name, changed = pattern.subn(text, name)
        if changed:
            break
    return name

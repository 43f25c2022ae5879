"""The loader node: which files it lists, which path it loads, and what it refuses."""

import sys
import types

import pytest
from speed_tier.nodes import loader, speed_tier
from speed_tier.nodes.loader import SpeedTierLoader, list_models
from speed_tier.speed.hosts import __name__ as hosts_name


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """The host's folder module over two real folders, `.gguf` not in its own list."""
    module = types.ModuleType("folder_paths")
    paths = [str(tmp_path / "unet"), str(tmp_path / "diffusion_models")]
    for path in paths:
        (tmp_path / path).mkdir()
    module.folder_names_and_paths = {"diffusion_models": (paths, {".safetensors"})}

    def files(key):
        roots, endings = module.folder_names_and_paths[key]
        found = {}
        for root in map(type(tmp_path), roots):
            for path in sorted(root.rglob("*")):
                if path.suffix in endings:
                    found.setdefault(path.relative_to(root).as_posix(), str(path))
        return found

    module.get_filename_list = lambda key: list(files(key))
    module.get_full_path = lambda key, name: files(key).get(name)
    monkeypatch.setitem(sys.modules, "folder_paths", module)
    module.tmp_path = tmp_path
    return module


@pytest.fixture
def loaded(monkeypatch, host):
    """What the engine was asked to load and to tier."""
    asked = []
    module = types.ModuleType(hosts_name + ".comfy_loader")
    module.load_model = lambda path, weight_dtype: asked.append((path, weight_dtype)) or "a model"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules[hosts_name], "comfy_loader", module, raising=False)

    def tier_clone(model, request, opener):
        asked.append((model, request.resolved.tier.value))
        return "a clone"

    monkeypatch.setattr(speed_tier.comfy, "tier_clone", tier_clone)
    return asked


def place(folders, *names):
    for name in names:
        path = folders.tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_lists_both_kinds_from_both_folders_once(folders):
    place(folders, "unet/a.gguf", "diffusion_models/B.safetensors", "diffusion_models/sub/c.gguf")
    place(folders, "unet/B.safetensors", "unet/notes.txt")
    assert list_models() == ["a.gguf", "B.safetensors", "sub/c.gguf"]


def test_a_list_of_another_pack_counts_too(folders):
    extra = folders.tmp_path / "elsewhere"
    place(folders, "elsewhere/z.gguf", "unet/a.gguf")
    folders.folder_names_and_paths["unet_gguf"] = ([str(extra)], {".gguf"})
    assert list_models() == ["a.gguf", "z.gguf"]


def test_a_folder_added_later_counts(folders):
    assert list_models() == []
    place(folders, "later/z.gguf")
    folders.folder_names_and_paths["diffusion_models"][0].append(str(folders.tmp_path / "later"))
    assert list_models() == ["z.gguf"]


def test_inputs(folders):
    place(folders, "unet/a.gguf")
    required = SpeedTierLoader.INPUT_TYPES()["required"]
    assert list(required) == ["model_name", "tier", "weight_dtype"]
    assert required["model_name"][0] == ["a.gguf"]
    assert required["tier"] == speed_tier.SpeedTier.INPUT_TYPES()["required"]["tier"]
    assert required["weight_dtype"][0][0] == required["weight_dtype"][1]["default"] == "default"


@pytest.mark.parametrize("tier", ["off", "default", "max"])
def test_loads_the_file_and_puts_it_in_its_tier(folders, loaded, tier):
    place(folders, "unet/a.gguf")
    list_models()
    assert SpeedTierLoader().load("a.gguf", tier, unique_id="4") == ("a clone",)
    path, weight_dtype = loaded[0]
    assert path.endswith("/unet/a.gguf")
    assert weight_dtype == "default"
    assert loaded[1] == ("a model", tier)


def test_an_unknown_tier_is_refused_before_loading(folders, loaded):
    place(folders, "unet/a.gguf")
    with pytest.raises(ValueError, match="off, default, max; found 'turbo'"):
        SpeedTierLoader().load("a.gguf", "turbo")
    assert loaded == []


def test_a_file_that_went_away(folders, loaded):
    list_models()
    with pytest.raises(FileNotFoundError, match=r"'gone.gguf' is not there any more"):
        SpeedTierLoader().load("gone.gguf", "off")
    assert loader._GGUF_KEY in folders.folder_names_and_paths

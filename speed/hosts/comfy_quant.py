"""Packed GGUF weights inside the host: its custom operations and its ModelPatcher.

`QuantOperations` is what the host builds a model from: every layer is the host's own but Linear,
which keeps a packed weight packed. `QuantModelPatcher` is the host's patcher with one difference:
a LoRA on a packed weight becomes adapters beside it. The weight itself is never written, so taking
a LoRA away leaves exactly what the file holds, and changing one moves no weight.

Works on ComfyUI 0.3.75 and 0.33. Imports the host: import this module lazily.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.utils
import torch
import torch.nn.functional as F
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn

from ..errors import SpeedTierError
from ..gguf.adapters import Adapters, low_rank_terms
from ..gguf.cache import drop_cache
from ..gguf.linear import QuantLinear, QuantState


class _CastView:
    """A packed layer as the host's cast function should see it: bytes, and no weight functions.

    Those take floats; they are called after dequantisation.
    """

    weight_function: Sequence[Any] = ()

    def __init__(self, linear: QuantLinear) -> None:
        self._linear = weakref.ref(linear)

    def _get(self) -> Any:
        linear = self._linear()
        assert linear is not None
        return linear

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._get().weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self._get().bias
        return bias

    @property
    def bias_function(self) -> Sequence[Any]:
        functions: Sequence[Any] = self._get().bias_function
        return functions


class QuantOperations(comfy.ops.manual_cast):
    """The host's operations, with a Linear that may hold a packed weight."""

    class Linear(QuantLinear, comfy.ops.manual_cast.Linear):
        def __init__(
            self,
            in_features: int,
            out_features: int,
            bias: bool = True,
            device: Any = None,
            dtype: torch.dtype | None = None,
        ) -> None:
            QuantLinear.__init__(self, in_features, out_features)
            self.has_bias = bias
            self._plain_dtype = dtype
            self._view: _CastView | None = None
            self.patches_attached: tuple[Any, ...] = ()  # the host's patches behind `adapters`

        # Set by the host: on the class, or on the layers that it patches at every call.
        weight_function: Any
        bias_function: Any

        def _load_from_state_dict(
            self,
            state_dict: dict[str, Any],
            prefix: str,
            local_metadata: Any,
            strict: bool,
            missing_keys: list[str],
            unexpected_keys: list[str],
            error_msgs: list[str],
        ) -> None:
            # The weight was never allocated; a packed one has a placeholder here and comes later.
            self.weight = self._plain(state_dict.get(prefix + "weight"))
            self.bias = self._plain(state_dict.get(prefix + "bias"))

        def _plain(self, value: Tensor | None) -> nn.Parameter | None:
            if value is None or value.is_meta:
                return None
            fresh = value.to(self._plain_dtype or value.dtype, copy=True)
            return nn.Parameter(fresh, requires_grad=False)

        def forward(self, input: Tensor) -> Tensor:
            if self.qtype is None:
                return comfy.ops.manual_cast.Linear.forward(self, input)
            comfy.ops.run_every_op()
            # Once each: a parameter of a module is found the slow way, and at 512 px the CPU's
            # share of a layer is its cost.
            weight, bias = self.weight, self.bias
            assert weight is not None
            device = input.device
            if (
                weight.device == device
                and (bias is None or (bias.dtype == input.dtype and bias.device == device))
                and not self.weight_function
                and not self.bias_function
            ):
                return self.product(input, weight, bias)
            return self.forward_comfy_cast_weights(input)

        def forward_comfy_cast_weights(self, input: Tensor) -> Tensor:
            if self.qtype is None:
                return comfy.ops.manual_cast.Linear.forward_comfy_cast_weights(self, input)
            if torch.compiler.is_compiling() and not self.bias_function:
                # The host's streams cannot be traced, and it does not use them here either.
                assert self.weight is not None
                packed = self.weight.to(input.device, non_blocking=True)
                bias = None if self.bias is None else self.bias.to(input.device, input.dtype)
                return self._output(input, packed, bias)
            if self._view is None:
                self._view = _CastView(self)
            packed, bias, stream = comfy.ops.cast_bias_weight(
                self._view,
                dtype=torch.uint8,
                device=input.device,
                bias_dtype=input.dtype,
                offloadable=True,
            )
            output = self._output(input, packed, bias)
            comfy.ops.uncast_bias_weight(self._view, packed, bias, stream)
            return output

        def _output(self, input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
            if not self.weight_function:
                return self.product(input, packed, bias)
            dense = self._patched(self.dense_weight(torch.float32, packed)).to(input.dtype)
            for function in self.weight_function:
                dense = function(dense)
            return F.linear(input, dense, bias)

        def _patched(self, dense: Tensor) -> Tensor:
            """A dequantised weight, `(rows, cols) float32`, with its adapters in it."""
            adapters = self.adapters
            return dense if adapters is None else adapters.merge_into(dense)

        def convert_weight(self, weight: Tensor, inplace: bool = False, **_: Any) -> Tensor:
            """The host's way to the floats of a weight it has cast, packed, to another dtype."""
            if self.qtype is None:
                return weight
            return self.dense_weight(torch.float32, weight.to(torch.uint8))


def needed_names(model: nn.Module) -> set[str]:
    """Every tensor that a model needs, also those that its file lacked.

    Our Linear has no parameter for such a tensor, so that the state dict alone would not say so.
    """
    names = set(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, QuantOperations.Linear):
            names.update([f"{path}.weight", *([f"{path}.bias"] if module.has_bias else [])])
    return names


def packed_layers(model: nn.Module) -> dict[str, QuantOperations.Linear]:
    """Packed layers by the key of their weight."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, QuantOperations.Linear) and module.qtype is not None
    }


class QuantModelPatcher(comfy.model_patcher.ModelPatcher):
    """A static patcher for models with packed weights."""

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self._attach_adapters()
        result = super().load(*args, **kwargs)
        self._drop_weight_patches()
        return result

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> Any:
        if force_patch_weights:
            self._refuse_to_save()
        if self._only_patches_changed(device_to):
            with self.use_ejected(skip_and_inject_on_exit_only=True):
                self._swap_patches(device_to)
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def partially_unload(
        self, device_to: torch.device, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> Any:
        freed = drop_cache(packed_layers(self.model).values())
        if freed and freed >= memory_to_free:
            return freed
        freed += super().partially_unload(device_to, memory_to_free - freed, force_patch_weights)
        self._drop_weight_patches()
        return freed

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        result = super().unpatch_model(device_to, unpatch_weights)
        if unpatch_weights:
            self._detach_adapters()
        return result

    def memory_required(self, input_shape: Any) -> Any:
        # The factors of a LoRA lie on the device beside the weights.
        adapters = (layer.adapters for layer in packed_layers(self.model).values())
        extra = sum(one.n_bytes for one in adapters if one is not None)
        return super().memory_required(input_shape) + extra

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if self._packed(key) is None:
            return super().patch_weight_to_device(key, *args, **kwargs)
        return None  # its adapters are attached

    def pin_weight_to_device(self, key: str) -> Any:
        layer = self._packed(key)
        if layer is not None and comfy.model_management.MAX_PINNED_MEMORY > 0:
            layer.leave_file()  # pinning pages of a mapped file is not for every driver
        return super().pin_weight_to_device(key)

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: dict[str, Any], key: str, *args: Any, **kwargs: Any
    ) -> Any:
        layer = self._packed(key)
        if layer is None:
            return super().patch_hook_weight_to_device(
                hooks, combined_patches, key, *args, **kwargs
            )
        patches = [*self.patches.get(key, ()), *combined_patches.get(key, ())]
        layer.adapters = self._adapters(key, layer, patches)
        layer.state.adapted = True
        layer.state.hooked.add(key)
        # The host clears its hooks by this table; packed weights have nothing to restore in it.
        self.cached_hook_patches.setdefault(hooks, {})[key] = (layer.adapters, None)
        return None

    def patch_cached_hook_weights(
        self, cached_weights: dict[str, Any], key: str, *args: Any, **kwargs: Any
    ) -> Any:
        layer = self._packed(key)
        if layer is None:
            return super().patch_cached_hook_weights(cached_weights, key, *args, **kwargs)
        layer.adapters = cached_weights[key][0]
        layer.state.adapted = True
        layer.state.hooked.add(key)
        return None

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> Any:
        result = super().unpatch_hooks(whitelist_keys_set)
        layers = packed_layers(self.model)
        states = {id(layer.state): layer.state for layer in layers.values()}
        for state in states.values():
            over = {k for k in state.hooked if not whitelist_keys_set or k in whitelist_keys_set}
            state.hooked -= over
            for key in over & layers.keys():
                layers[key].adapters = self._adapters(key, layers[key], self.patches.get(key, ()))
        return result

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_to_save()
        return super().model_state_dict_for_saving(*args, **kwargs)

    def _refuse_to_save(self) -> None:
        """Hosts save what they find: of a packed layer that would be its bytes, as weights."""
        if packed_layers(self.model):
            raise SpeedTierError(
                "Saving a model or extracting a LoRA needs dense weights; found a GGUF model. "
                "Load the safetensors file of the model and save from that."
            )

    def _packed(self, key: str) -> QuantOperations.Linear | None:
        path, _, name = key.rpartition(".")
        if name != "weight":
            return None
        try:
            module = comfy.utils.get_attr(self.model, path)
        except AttributeError:
            return None
        is_packed = isinstance(module, QuantOperations.Linear) and module.qtype is not None
        return module if is_packed else None

    def _attach_adapters(self) -> None:
        """Put this clone's patches beside every packed weight; where none, take the last away."""
        for state, layers in _by_state(packed_layers(self.model).items()):
            for key, layer in layers:
                patches = self.patches.get(key, ())
                if not _same_patches(layer.patches_attached, patches):
                    layer.adapters = self._adapters(key, layer, patches)
                    layer.patches_attached = tuple(patches)
            state.adapted = any(layer.adapters is not None for _, layer in layers)
            state.hooked.clear()

    def _detach_adapters(self) -> None:
        for state, layers in _by_state(packed_layers(self.model).items()):
            for _, layer in layers:
                layer.adapters, layer.patches_attached = None, ()
            state.adapted = False
            state.hooked.clear()

    def _adapters(
        self, key: str, layer: QuantOperations.Linear, patches: Sequence[Any]
    ) -> Adapters | None:
        if not patches:
            return None
        terms = low_rank_terms(patches, (layer.out_features, layer.in_features))
        if terms is not None:
            return Adapters(terms)
        kept = list(patches)

        def rewrite(dense: Tensor) -> Tensor:
            patched: Tensor = comfy.lora.calculate_weight(kept, dense, key)
            return patched

        return Adapters(rewrite=rewrite)

    def _drop_weight_patches(self) -> None:
        """Take the host's own LoRA off offloaded packed layers: the adapters do it."""
        for key, layer in packed_layers(self.model).items():
            kept = [
                function
                for function in layer.weight_function
                if not (hasattr(function, "patches") and getattr(function, "key", None) == key)
            ]
            if len(kept) != len(layer.weight_function):
                layer.weight_function = kept

    def _only_patches_changed(self, device_to: torch.device) -> bool:
        model = self.model
        loaded = model.current_weight_patches_uuid
        return (
            loaded is not None
            and loaded != self.patches_uuid
            and not model.model_lowvram
            and model.model_loaded_weight_memory > 0
            and model.device == device_to
            # The host puts functions on weights, and takes them off, when it loads.
            and not self.weight_wrapper_patches
            and not any(map(_has_functions, model.modules()))
        )

    def _swap_patches(self, device_to: torch.device) -> None:
        """Other patches on a loaded model, without moving it away and back as the host does."""
        self.unpatch_hooks()
        for key, backup in list(self.backup.items()):
            if backup.inplace_update:
                comfy.utils.copy_to_param(self.model, key, backup.weight)
            else:
                comfy.utils.set_attr_param(self.model, key, backup.weight.to(device_to))
        self.backup.clear()
        for *_, path, _, names in self._load_list():
            for name in names:  # and no other parameter: the host leaves those of a model alone
                if (key := f"{path}.{name}") in self.patches:
                    self.patch_weight_to_device(key, device_to=device_to)
        self._attach_adapters()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, device_to, 0, False, True)


def _has_functions(module: nn.Module) -> bool:
    return bool(getattr(module, "weight_function", ()) or getattr(module, "bias_function", ()))


def _by_state(
    layers: Iterable[tuple[str, QuantOperations.Linear]],
) -> Iterator[tuple[QuantState, list[tuple[str, QuantOperations.Linear]]]]:
    grouped: dict[int, list[tuple[str, QuantOperations.Linear]]] = {}
    for key, layer in layers:
        grouped.setdefault(id(layer.state), []).append((key, layer))
    for members in grouped.values():
        yield members[0][1].state, members


def _same_patches(attached: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether two lists of the host's patches are the same adapters, at the same strengths."""
    if len(attached) != len(wanted):
        return False
    for (a, adapter_a, *rest_a), (b, adapter_b, *rest_b) in zip(attached, wanted, strict=True):
        if a != b or adapter_a is not adapter_b or rest_a != rest_b:
            return False
    return True

"""``LatentCache``: the transformers cache of models that decode in latent space."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from mla_convert.errors import MismatchError, UsageError
from mla_convert.patches.cache_files import read_layers, write_layers
from mla_convert.patches.cache_formats import CacheFormat, parse_format
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.latent_checks import check_widths, refuse_length
from mla_convert.patches.latent_layer import LatentLayer
from mla_convert.recipe import parse_device


class LatentCache(DynamicCache):
    """A transformers cache whose full-attention layers are :class:`LatentLayer`; other layers stay as they are.

    Layers of other kinds (windows, linear attention, an indexer's keys) keep the model's dtype.

    In the model's dtype it holds what ``DynamicCache`` holds, bit for bit. A format of codes rounds each latent once,
    when it is appended; a patched model decodes from the codes, everything else reads the numbers back from them.

    Args:
        config: the model's config; without it every layer is a latent layer.
        format: "model" (the model's dtype), "int8", "int4", "fp8" (one scale per token), the same in groups
            ("int4:32"), or "flashmla" (FlashMLA's row of 656 bytes; C = 512, R = 64 and bfloat16 alone).
        capacity: tokens allocated at once, and never more; None grows by a quarter whenever the room is used up.
        offloading: as for ``DynamicCache``.

    Raises:
        UsageError: for arguments that are not known, codes for a model without full-attention layers, or groups that
            do not fit the latents of ``config``. ``update`` raises it for tokens of another model, dtype or batch, for
            more than ``capacity``, and on a CPU with ``offloading``; ``crop`` for more tokens than are stored.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        format: str = "model",
        capacity: int | None = None,
        offloading: bool = False,
    ) -> None:
        self.format = parse_format(format)
        _check_capacity(capacity)
        super().__init__(config=config, offloading=offloading)
        make: Any = functools.partial(LatentLayer, self.format, capacity)
        self.made_for = made_for(config)
        expected = expected_widths(config, len(self.layers))
        self.layers = [
            make(width) if type(layer) is DynamicLayer else layer
            for layer, width in zip(self.layers, expected, strict=True)
        ]
        check_fits(self.format, [layer.expected for layer in self.layers if isinstance(layer, LatentLayer)])
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = make
        elif self.format.coded and not any(isinstance(layer, LatentLayer) for layer in self.layers):
            kinds = sorted({type(layer).__name__ for layer in self.layers})
            raise UsageError(
                f"format {str(self.format)!r} is for layers of full attention, and this model has none "
                f"({', '.join(kinds)}): use the model's dtype"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to layer ``layer_idx``; see :meth:`LatentLayer.update`."""
        if self.offloading:
            check_offloading(key_states.device)
        if self.layer_class_to_replicate is None and layer_idx >= len(self.layers):
            raise UsageError(
                f"this LatentCache was made for a model of {len(self.layers)} layers, and layer {layer_idx} was given "
                "tokens: make it from the config of the model it is used with"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every layer (a negative number, as transformers passes it).

        A layer that no token ever reached, since it uses another's, stays empty.

        Raises:
            ArgumentError: for a positive number; it is a ValueError as well, as transformers' own.
            UsageError: for more tokens than are stored; nothing has changed then.
        """
        refuse_length(tokens_to_remove)
        stored = [layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        if -tokens_to_remove > max(stored, default=0):
            raise UsageError(f"crop({tokens_to_remove}) on a cache of {max(stored, default=0)} tokens")
        super().crop(tokens_to_remove)

    def fork(self) -> LatentCache:
        """Another cache that begins with what is stored here: a filled prefix is shared until one of them appends.

        Whoever appends first copies the rows and goes on with its own; the others keep theirs.
        """
        other: LatentCache = copy.copy(self)
        other.layers = [
            layer.fork() if isinstance(layer, LatentLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is stored to the new file ``path`` (safetensors); room to grow is not written.

        Raises:
            UsageError: the file is there already, cannot be written, or a layer is not a latent one.
        """
        write_layers(self.layers, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: PreTrainedConfig | None = None,
        *,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
    ) -> LatentCache:
        """The cache that :meth:`save` wrote, in the format that it had.

        Args:
            config: of the model that it will be used with; the file is then checked against it.
            capacity: as for a new cache.
            device: where the rows are put.

        Raises:
            UsageError: ``device`` is not known, or not there.
            CheckpointError: no such file, not one of these, or damaged.
            MismatchError: it was saved with a model of other widths, or of another number of layers, than ``config``.
        """
        _check_capacity(capacity)
        layers = read_layers(path, parse_device(device), capacity)
        plain: list[Any] = [] if config is None else cls(config).layers
        if config is not None and len(layers) != len(plain):
            raise MismatchError(
                f"{path} holds {len(layers)} layers, the model has {len(plain)}: it was saved with another model"
            )
        for index, layer in enumerate(layers):
            layer.expected = getattr(plain[index], "expected", None) if plain else None
            check_widths(layer.layout, layer.expected, f"{path}, layer {index}")
        cache = cls(config, format=str(layers[0].form) if layers else "model", capacity=capacity)
        cache.layers = list(layers)
        return cache

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored tokens, over all latent layers; room to grow is not counted."""
        rows = [(layer.rows, layer.length) for layer in self.layers if isinstance(layer, LatentLayer)]
        return sum(r[:, :length].numel() * r.element_size() for r, length in rows if r is not None)


def check_offloading(device: torch.device) -> None:
    """UsageError for a model on the CPU, which is where offloading moves layers to."""
    if device.type == "cpu":
        raise UsageError(
            "offloading moves layers from the model's device to the CPU while others run, and this model runs on the "
            "CPU: leave offloading out"
        )


def _check_capacity(capacity: int | None) -> None:
    if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1):
        raise UsageError(f"capacity is a number of tokens from 1, or None to grow; found {capacity!r}")


def check_fits(form: CacheFormat, widths: Iterable[tuple[int, int] | None]) -> None:
    """UsageError where ``form`` does not fit latents of one of these (C, R), whatever the dtype."""
    for known in widths:
        if known is not None:
            RowLayout(form, *known, torch.bfloat16)


def expected_widths(config: PreTrainedConfig | None, layers: int) -> list[tuple[int, int] | None]:
    """(C, R) of each layer by its part of the config; None where that says nothing."""
    parts = [] if config is None else list(config.get_text_config(decoder=True).per_layer_config)
    if len(parts) != layers:
        return [None] * layers
    found = [(getattr(part, "kv_lora_rank", None), getattr(part, "qk_rope_head_dim", None)) for part in parts]
    return [(c, r) if isinstance(c, int) and isinstance(r, int) else None for c, r in found]


def made_for(config: PreTrainedConfig | None) -> int | None:
    """Layers of the model that a cache is made for, by its config; None without one."""
    return None if config is None else getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)


def check_model(cache: Any, found: int | None) -> None:
    """Raise a UsageError if ``cache`` is one of ours that was made for a model of more or fewer layers than ``found``.

    Only a patched model can tell: tokens for a layer too many show by themselves, a layer that never gets any does not.
    """
    made = getattr(cache, "made_for", None)
    if made is not None and made != found:
        raise UsageError(
            f"this {type(cache).__name__} was made for a model of {made} layers, and the model has {found}: make it "
            "from the config of the model it is used with"
        )


def adopt(cache: Cache, index: int, form: CacheFormat | None = None) -> None:
    """Make layer ``index`` of ``cache`` a latent layer if it is a plain, still empty ``DynamicLayer``."""
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
    if index >= len(cache.layers):
        return
    layer = cache.layers[index]
    if type(layer) is DynamicLayer and not layer.is_initialized:
        cache.layers[index] = LatentLayer(form)


def handing_layer(cache: Any, index: int) -> Any:
    """Layer ``index`` of ``cache`` if it is one of ours whose rows need scales or pages to be read; else None."""
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    return layer if getattr(layer, "hands_over", False) else None

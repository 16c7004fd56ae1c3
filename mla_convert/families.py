"""The table of model families: what tells one from another, as data.

Adding a family adds a row. Everything else of the package sees geometries, names and reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mla_convert import schedules
from mla_convert.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Spelling:
    """Names of one kind of checkpoint.

    ``prefix`` is where the tensors of an MLA module stand, with ``{layer}`` and, where a layer has several,
    ``{attention}``. ``words`` are the checkpoint's words for modules that transformers calls otherwise.
    """

    prefix: str = "model.layers.{layer}.self_attn"
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)


_PLAIN = (Spelling(),)
#: Text models inside a wrapper: as published, or as transformers writes or holds them.
_WRAPPED = (
    Spelling("model.language_model.layers.{layer}.self_attn"),
    Spelling("language_model.model.layers.{layer}.self_attn"),
    # transformers 5.24 writes Kimi's text layers so.
    Spelling("language_model.model.blocks.{layer}.self_attn"),
    Spelling("language_model.layers.{layer}.self_attn"),
)
_BAILING = Spelling("model.layers.{layer}.attention", {"o_proj": "dense"})
_MISTRAL = Spelling(
    "layers.{layer}.attention",
    {
        "q_proj": "wq",
        "kv_a_proj_with_mqa": "wkv_a_with_mqa",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "wkv_b",
        "o_proj": "wo",
    },
)
_DIRECT = {"q_lora_rank": None}
_GATE = "the attention output is multiplied by a gate, number by number, before o_proj"
_QUERY_AND_GATE = "the query's projection, q_gate_proj, makes the output gate as well"


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells one model family from another.

    ``inner`` is the config's key for the text model in a wrapper. ``spellings``: the names in checkpoints, the first
    one first. ``query`` says which query paths exist: through a query latent (``"latent"``), straight from the hidden
    state (``"direct"``), or either, as ``q_lora_rank`` says. ``query_gates``: the query's up-projection reads the
    query latent twice (normed and not) and has V more rows in each head, for the output gate. ``mscale``: YaRN's
    ``mscale_all_dim`` enters the softmax scale. ``places``: which layers have MLA. ``defaults``: what transformers
    takes where the config is silent. ``between_qk`` and ``between_vo``: what happens between the two projections of
    that side, so that they cannot be multiplied in advance; empty where they can (a factor for each token and head
    is no obstacle).
    """

    model_type: str
    attention_class: str
    aliases: tuple[str, ...] = ()
    inner: str | None = None
    spellings: tuple[Spelling, ...] = _PLAIN
    query: Literal["latent", "direct", "either"] = "either"
    query_gates: bool = False
    mscale: bool = True
    places: Schedule = schedules.every_layer
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    between_qk: str = ""
    between_vo: str = ""
    notes: str = ""

    @property
    def query_projection(self) -> str:
        """The module that makes the query's heads from the query latent."""
        return "q_gate_proj" if self.query_gates else "q_b_proj"

    def between(self, side: Literal["qk", "vo"]) -> str:
        """Why the side cannot be fused; empty where it can."""
        return self.between_qk if side == "qk" else self.between_vo


_ROWS = (
    Family("deepseek_v2", "DeepseekV2Attention", notes="with and without query rank"),
    Family("deepseek_v3", "DeepseekV3Attention", aliases=("kimi_k2",)),
    Family(
        "kimi_k25",
        "DeepseekV3Attention",
        inner="text_config",
        spellings=(_WRAPPED[1], _WRAPPED[2], _WRAPPED[0], _WRAPPED[3]),
        notes="text part",
    ),
    Family("sarvam_mla", "DeepseekV3Attention", defaults=_DIRECT),
    Family("glm4_moe_lite", "Glm4MoeLiteAttention"),
    Family("youtu", "YoutuAttention"),
    Family("axk1", "AXK1Attention", query="latent"),
    Family("minicpm3", "MiniCPM3Attention", defaults={"v_head_dim": None}),  # None: hidden size over heads
    Family(
        "mistral4",
        "Mistral4Attention",
        defaults={"rope_parameters": {"rope_type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0}},
        notes="query scaled by position",
    ),
    Family(
        "longcat_flash",
        "LongcatFlashMLA",
        spellings=(Spelling("model.layers.{layer}.self_attn.{attention}"),),
        query="latent",
        places=schedules.two_a_layer,
        notes="two attentions a layer, query and latent scaled",
    ),
    Family(
        "kimi_linear",
        "KimiLinearAttention",
        mscale=False,
        places=schedules.kimi_linear,
        defaults=_DIRECT,
        notes="full-attention layers, no rotation",
    ),
    Family(
        "bailing_hybrid",
        "BailingHybridAttention",
        spellings=(_BAILING, *_PLAIN),
        places=schedules.last_of_group,
        defaults=_DIRECT,
        notes="full-attention layers, a gate per head",
    ),
    Family("deepseek_v32", "DeepseekV32Attention", query="latent", notes="DSA"),
    Family("glm_moe_dsa", "GlmMoeDsaAttention", query="latent", notes="DSA, selection shared between layers"),
    Family(
        "axk2",
        "AXK2Attention",
        spellings=(Spelling(words={"q_gate_proj": "q_b_proj"}),),
        query="latent",
        query_gates=True,
        between_qk=_QUERY_AND_GATE,
        between_vo=_GATE,
        notes="DSA, elementwise gate",
    ),
    Family(
        "hy_v4",
        "HYV4Attention",
        query="latent",
        between_vo=_GATE,
        notes="DSA, sinks, elementwise gate",
    ),
    Family(
        "hy_v4_vl",
        "HYV4VLAttention",
        aliases=("hy_v4_vl_text",),
        inner="text_config",
        spellings=(*_PLAIN, *_WRAPPED),
        query="latent",
        between_vo=_GATE,
        notes="text part; as hy_v4",
    ),
    Family(
        "dots3_note",
        "Dots3NoteTextAttention",
        aliases=("dots3_note_text",),
        inner="text_config",
        spellings=(*_PLAIN, *_WRAPPED),
        query="latent",
        mscale=False,
        places=schedules.sliding_apart,
        notes="text part; DSA, sliding layers with dimensions of their own, a gate per head",
    ),
    Family(
        "glm5_next",
        "Glm5NextTextAttention",
        aliases=("glm5_next_text",),
        inner="text_config",
        spellings=(*_WRAPPED, *_PLAIN),
        query="latent",
        mscale=False,
        places=schedules.every_fourth,
        defaults={"qk_rope_head_dim": 0},
        notes="text part; DSA over pools, no rotary key",
    ),
    Family(
        "mistral_large4",
        "MistralLarge4TextAttention",
        aliases=("mistral_large4_text",),
        inner="text_config",
        spellings=(_MISTRAL, *_WRAPPED, *_PLAIN),
        query="direct",
        places=schedules.shared_latents,
        notes="text part; DSA, latents shared between layers, layers without rotation",
    ),
)
#: Every family by its ``model_type``.
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ROWS}

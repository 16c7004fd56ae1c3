"""Families, each mechanism broken on purpose, and the tests that must notice; devices and versions, too."""

from __future__ import annotations

from broken_changes import (
    ATTEND,
    WEIGHTS,
    Row,
    after,
    always_on,
    attending,
    before,
    decoding,
    does,
    factor_one,
    first_layer_alone,
    heads_back,
    masked,
    no_window,
    noting_owner,
    one_token_late,
    other_heads,
    part_of_content,
    without_youtu,
)

FAMILIES = "tests/test_families.py"
SELECTION = "tests/test_selection.py"
SAME = f"{FAMILIES}::test_logits_and_tokens_are_the_same"

FAMILY_ROWS = (
    Row(
        "families are rows of a table; a new class is noticed",
        "a row is missing",
        (("mla_convert.families:FAMILIES", without_youtu), ("mla_convert.architectures:FAMILIES", without_youtu)),
        (
            f"{FAMILIES}::test_every_row_has_a_model",
            f"{FAMILIES}::test_the_table_has_every_mla_class_of_transformers",
            "tests/test_family_table.py::test_the_readme_has_the_table_of_the_code",
        ),
    ),
    Row(
        "factored in every family",
        "the queries of two heads change places",
        ((f"{WEIGHTS}.lift_query", after(lambda lifted: lifted.roll(1, dims=2))),),
        (f"{SAME}[deepseek_v2]", f"{SAME}[kimi_k25]", f"{SAME}[kimi_linear]"),
    ),
    Row(
        "fused where it is exact",
        "the fused queries of two heads change places",
        ((f"{WEIGHTS}.make_query", after(lambda made: made.roll(48, dims=-1))),),
        (f"{FAMILIES}::test_fused_where_it_may_be[youtu]", f"{FAMILIES}::test_deepseek_v2_with_a_query_rank[fused]"),
    ),
    Row(
        "fused refused with the reason; elementwise gates",
        "what stands between two projections is not asked for",
        (
            (
                "mla_convert.patches.recognition:_resolve_side",
                before(lambda side, wanted, cheaper, between: ((side, wanted, cheaper, ""), {})),
            ),
        ),
        (f"{FAMILIES}::test_fused_where_it_may_be[axk2]", f"{FAMILIES}::test_fused_where_it_may_be[hy_v4]"),
    ),
    Row(
        "auto is right, also where fused is cheaper",
        "auto is always factored",
        (("mla_convert.patches.recognition:choose_form", after(lambda forms: type(forms)("factored", "factored"))),),
        (f"{FAMILIES}::test_auto_where_fused_reads_less[mistral4]", "tests/test_patch_forms.py"),
    ),
    Row(
        "conversion",
        "weights of a folder are those of another row",
        (("mla_convert.patches.sidecar:Sidecar.stored", after(lambda s: type(s)(s.forms, s.qk.roll(1, 0), s.vo))),),
        (f"{FAMILIES}::test_converted_and_loaded[deepseek_v3-auto]",),
    ),
    Row(
        "verification",
        "the queries of two heads change places",
        ((f"{WEIGHTS}.lift_query", after(lambda lifted: lifted.roll(1, dims=2))),),
        ("tests/test_families_everywhere.py::test_verified_from_its_folder[deepseek_v3]",),
    ),
    Row(
        "two attentions a layer",
        "the second of a layer is not patched",
        (("mla_convert.patches.apply:attention_modules", after(first_layer_alone)),),
        (f"{SAME}[longcat_flash]",),
    ),
    Row(
        "the text part of wrappers is found and patched",
        "the setting is for all parts of the model",
        (("mla_convert.patches.apply:attention_setting", lambda original: lambda model, modules, name: name),),
        (f"{SELECTION}::test_the_vision_tower_keeps_its_attention",),
    ),
    Row(
        "an unknown family says so",
        "nothing is said",
        (("mla_convert.patches.recognition:logger.warning", does(None)),),
        ("tests/test_patch_errors.py::test_an_unknown_family_with_the_same_seam",),
    ),
    Row(
        "indices are used to gather",
        "they become a mask over the whole history",
        (decoding(masked),),
        (f"{SELECTION}::test_the_work_follows_the_selection[deepseek_v32]",),
    ),
    Row(
        "indices choose what is seen",
        "everything is seen",
        (decoding(lambda args: {"indices": None}),),
        (
            f"{SELECTION}::test_gathered_masked_and_expanded_are_the_same[deepseek_v32-100]",
            f"{SAME}[glm_moe_dsa]",
            f"{SAME}[glm5_next]",
        ),
    ),
    Row(
        "sinks enter the denominator",
        "they are left out",
        (("mla_convert.kernels.torch_decode:with_sinks", lambda original: lambda out, lse, sinks: (out, lse)),),
        (f"{SAME}[hy_v4]", f"{SAME}[hy_v4_vl]"),
    ),
    Row(
        "sliding windows",
        "the mask hides nothing that came before",
        (("mla_convert.patches.attention:seen_by", no_window),),
        ("tests/test_families_everywhere.py::test_every_cache_and_threshold[dots3_note-eager]",),
    ),
    Row(
        "gates per head",
        "they are those of the next head",
        ((ATTEND, other_heads), (f"{WEIGHTS}.make_output", heads_back)),
        (
            f"{FAMILIES}::test_fused_where_it_may_be[bailing_hybrid]",
            f"{FAMILIES}::test_fused_where_it_may_be[dots3_note]",
        ),
    ),
    Row(
        "scales on the query",
        "the factor of a fused query is one",
        (attending(factor_one),),
        (f"{FAMILIES}::test_fused_where_it_may_be[mistral4]",),
    ),
    Row(
        "layers without rotation",
        "a part of their content is taken for a rotary part",
        (attending(part_of_content),),
        (f"{SAME}[glm5_next]", f"{SAME}[mistral_large4]"),
    ),
    Row(
        "latents shared between layers",
        "a layer reads those that it shares one token late",
        (("mla_convert.patches.layer:AbsorbedLayer.__init__", noting_owner), attending(one_token_late)),
        (f"{SAME}[mistral_large4]",),
    ),
    Row(
        "an argument that nobody knows is an error",
        "it is ignored",
        (("mla_convert.patches.attention:check_known", does(None)),),
        (
            f"{SELECTION}::test_an_argument_that_nobody_knows_is_refused",
            "tests/test_keywords.py::test_an_argument_that_changes_attention_is_never_ignored",
        ),
    ),
    Row(
        "attention in both directions",
        "it looks back alone",
        (("mla_convert.patches.originals:looks_ahead", does(False)),),
        ("tests/test_keywords.py::test_attention_in_both_directions",),
    ),
    Row(
        "sparse attention over a StaticCache",
        "all that there is room for is looked at",
        (("mla_convert.patches.seeing:end_of", lambda original: lambda mask, kv_len: kv_len),),
        ("tests/test_static_work.py::test_the_attention_function_touches_what_is_stored[deepseek_v32]",),
    ),
    Row(
        "sparse attention gathers what is seen",
        "what was chosen and is not seen is gathered, too",
        (("mla_convert.kernels.torch_decode:_without_unseen", lambda original: lambda at, valid: (at, valid)),),
        ("tests/test_decode.py::test_what_is_chosen_but_not_seen_is_not_gathered",),
    ),
    Row(
        "sparse attention expands what is stored of a StaticCache",
        "it expands all that there is room for",
        (("mla_convert.patches.masks:end_of", lambda original: lambda mask, kv_len: kv_len),),
        ("tests/test_static_work.py::test_an_expanded_prefill_expands_what_is_stored[deepseek_v32]",),
    ),
    Row(
        "absorbed weights of offloaded modules go with them",
        "they stay in memory",
        ((f"{WEIGHTS}._keep", always_on),),
        ("tests/test_offload.py::test_offloaded_weights",),
    ),
    Row(
        "an unsupported transformers is refused",
        "it is not",
        (("mla_convert.patches.apply:check_transformers", does(None)),),
        ("tests/test_versions.py::test_other_releases_are_refused",),
    ),
)

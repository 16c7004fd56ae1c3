"""What users do with a patched model, each broken on purpose, and the tests that must notice."""

from __future__ import annotations

from broken_changes import (
    LAYER,
    PRESENT,
    SLOT,
    WEIGHTS,
    Row,
    as_if_not_offloaded,
    attending,
    breaking,
    counting,
    decoding,
    does,
    drawing,
    every_kind,
    first_row_lost,
    forgetful,
    late,
    not_plain_doubled,
    one_for_all,
    persistent,
    scales_of_the_first,
    seeing_ahead,
    shallow,
)

FAMILIES = "tests/test_families.py"
GENERATE = "tests/test_generate.py"
CACHES = "tests/test_generate_caches.py"
STATIC = "tests/test_generate_static.py"
TRAINING = "tests/test_generate_training.py"
THREADS = "tests/test_generate_threads.py"
FRESH = "tests/test_freshness.py"
ADAPTERS = "tests/test_adapters.py"
CODES = "tests/test_quantized_projections.py"
DECODING = "tests/test_patch_decode.py"
FLASH = "tests/test_patch_flash.py"
SAME = f"{FAMILIES}::test_logits_and_tokens_are_the_same"
NO_MASK = decoding(lambda args: {"mask": None})
SEES_AHEAD = decoding(seeing_ahead)
STALE = f"{WEIGHTS}.follow", does(False)

FEATURE_ROWS = (
    Row(
        "greedy",
        "the new token does not see itself",
        (decoding(lambda args: {"latent": args.latent[:, :-1], "k_rope": args.k_rope[:, :-1], "mask": None}),),
        (f"{GENERATE}::test_greedy", "tests/test_generate_families.py::test_a_left_padded_batch[youtu-greedy]"),
    ),
    Row(
        "sampling with a seed",
        "attention draws a random number",
        (attending(drawing),),
        (f"{GENERATE}::test_sampling_with_a_seed",),
    ),
    Row(
        "beam search",
        "the cache is not reordered",
        ((f"{LAYER}.reorder_cache", does(None)),),
        (f"{GENERATE}::test_beam_search",),
    ),
    Row(
        "left-padded batches; pipeline",
        "padding is seen",
        (NO_MASK,),
        (
            f"{GENERATE}::test_left_padded_batch",
            f"{GENERATE}::test_pipeline",
            "tests/test_generate_families.py::test_a_left_padded_batch[minicpm3-greedy]",
        ),
    ),
    Row(
        "assisted decoding: a draft model, prompt lookup, the model's own layers",
        "rejected tokens stay in the cache",
        ((f"{LAYER}.crop", does(None)),),
        (
            f"{GENERATE}::test_assisted_by_a_draft_model",
            f"{GENERATE}::test_assisted_by_prompt_lookup",
            f"{GENERATE}::test_assisted_by_early_exit",
            "tests/test_generate_mtp.py",
        ),
    ),
    Row(
        "contrastive and custom logits processors",
        "the caches of two models are one",
        (("mla_convert.patches.attention:adopt", one_for_all),),
        (f"{GENERATE}::test_contrastive_and_custom_processors",),
    ),
    Row(
        "DynamicCache",
        "the first token is lost",
        ((f"{LAYER}.update", first_row_lost),),
        (f"{CACHES}::test_generate_with_every_cache[small-dynamic]", f"{SAME}[axk1]"),
    ),
    Row(
        "StaticCache: no graph break",
        "there is one",
        (attending(breaking),),
        (
            f"{STATIC}::test_the_compiled_step_is_one_graph_for_all_tokens",
            f"{STATIC}::test_generate_that_compiles_its_step",
        ),
    ),
    Row(
        "StaticCache: no recompilation per token",
        "attention depends on how often it was called",
        (attending(counting),),
        (f"{STATIC}::test_the_compiled_step_is_one_graph_for_all_tokens",),
    ),
    Row(
        "StaticCache: work follows the tokens used",
        "all that the cache can hold is read",
        (
            ("mla_convert.patches.seeing:end_of", lambda original: lambda mask, kv_len: kv_len),
            decoding(lambda args: {"kv_lens": None}),
        ),
        (f"{STATIC}::test_work_follows_the_tokens_used[eager]",),
    ),
    Row(
        "StaticCache: work follows the tokens used, compiled",
        "all that the cache can hold is read",
        (decoding(lambda args: {"kv_lens": None}),),
        (f"{STATIC}::test_work_follows_the_tokens_used[compiled]",),
    ),
    Row(
        "sliding and quantized caches",
        "latent layers take their place",
        (("mla_convert.patches.attention:adopt", every_kind),),
        tuple(
            f"{CACHES}::test_generate_with_every_cache[small-{kind}]" for kind in ("sliding", "fp8", "grouped-codes")
        ),
    ),
    Row(
        "offloaded cache",
        "its layers are replaced by some that do not move",
        (("mla_convert.patches.installing:begin_call", as_if_not_offloaded),),
        (f"{CACHES}::test_offloaded_cache[dynamic]",),
    ),
    Row(
        "prefix reuse",
        "a copied cache writes into the rows of the first",
        ((f"{LAYER}.__deepcopy__", shallow),),
        (f"{CACHES}::test_copies_of_a_prefix_grow_apart[latent]",),
    ),
    Row(
        "a cache filled once, deep-copied, continued",
        "the copy holds zeros",
        ((f"{LAYER}.__deepcopy__", forgetful),),
        (f"{CACHES}::test_prefix_reuse[small-latent]", f"{CACHES}::test_prefix_reuse[small-dynamic]"),
    ),
    Row(
        "chunked prefill; packed sequences",
        "tokens of one call see what comes later, and other sequences",
        (SEES_AHEAD,),
        (
            f"{CACHES}::test_chunked_prefill_with_every_chunk_size[None]",
            f"{CACHES}::test_chunked_prefill_of_a_padded_batch",
            f"{DECODING}::test_packed_sequences",
            "tests/test_generate_families.py::test_a_left_padded_batch[glm4_moe_lite-chunked]",
        ),
    ),
    Row(
        "packed sequences over flash attention",
        "they are not recognized",
        (("mla_convert.patches.attention:_packed", does(False)),),
        (f"{FLASH}::test_packed_sequences_over_flash_attention",),
    ),
    Row(
        "continuous batching is refused with a reason",
        "it is not",
        (("mla_convert.patches.apply:add_refusals", does(None)),),
        (f"{GENERATE}::test_continuous_batching_is_refused_at_the_call",),
    ),
    Row(
        "output_attentions falls back to the expanded path",
        "it does not",
        (("mla_convert.patches.attention:_wants_attention_weights", does(False)),),
        (f"{GENERATE}::test_attention_weights_run_expanded_and_say_so",),
    ),
    Row(
        "output_attentions says so",
        "nothing is said",
        (("mla_convert.patches.layer:Options.say_once", does(None)),),
        (f"{GENERATE}::test_attention_weights_run_expanded_and_say_so",),
    ),
    Row(
        "save_pretrained writes the original weights",
        "the absorbed ones are part of the state",
        ((f"{WEIGHTS}._keep", persistent),),
        (f"{TRAINING}::test_a_patched_model_saves_the_original",),
    ),
    Row(
        "training and backward; gradient checkpointing",
        "the absorbed form runs while gradients are on",
        (("mla_convert.patches.attention:wants_gradients", does(False)),),
        (f"{TRAINING}::test_backward_equals_the_original", f"{TRAINING}::test_gradient_checkpointing"),
    ),
    Row(
        "half, to(device), to(dtype); load_state_dict, optimizer steps, edits in place",
        "absorbed weights stay as they are",
        (STALE,),
        (
            f"{TRAINING}::test_casting_and_moving_a_patched_model",
            f"{TRAINING}::test_training_and_decoding_take_turns",
            *(
                f"{FRESH}::test_the_next_step_follows[{{}}-kv_b_proj-{change}]"
                for change in ("load_other", "optimizer_step", "change_in_place", "replace_parameter")
            ),
        ),
    ),
    Row(
        "edits in place that leave no other trace",
        "no numbers are compared",
        (("mla_convert.patches.freshness:_sample", lambda original: lambda tensor: tensor.new_zeros(1)),),
        (f"{FRESH}::test_the_next_step_follows[{{}}-kv_b_proj-change_data_in_place]",),
    ),
    Row(
        "deepcopy, pickling",
        "the call under way cannot be copied",
        ((f"{SLOT}.__reduce__", lambda original: object.__reduce__),),
        (f"{TRAINING}::test_copies_and_pickles_generate_on_their_own",),
    ),
    Row(
        "threads that decode two models at once",
        "all threads have one call",
        (
            (f"{SLOT}.set", lambda original: lambda self, call: PRESENT.update(call=call)),
            (f"{SLOT}.get", late),
        ),
        (f"{THREADS}::test_threads_generate_at_once[two-models-fused]",),
    ),
    Row(
        "LoRA: active, two adapters",
        "adapters are passed over",
        (("mla_convert.patches.adapters:_counting", does([])),),
        tuple(f"{ADAPTERS}::test_adapters_that_come_and_go[{form}-kv_b_proj q_b_proj o_proj]" for form in ("{}",)),
    ),
    Row(
        "LoRA: merged, disabled, another one",
        "changes are not seen",
        (STALE,),
        (f"{ADAPTERS}::test_the_next_step_follows",),
    ),
    Row(
        "fp8, compressed-tensors, bitsandbytes, torchao",
        "their numbers are twice as large",
        (("mla_convert.patches.weights:effective_weight", not_plain_doubled),),
        tuple(
            f"{CODES}::test_a_model_is_what_its_numbers_say[{form}]"
            for form in ("fp8-blocks", "torchao-int8", "packed-int4", "nf4", "llm-int8")
        ),
    ),
    Row(
        "codes kept in memory",
        "they are dequantized once all the same",
        (("mla_convert.patches.weights:choose_product", does("dequantized once")),),
        (
            "tests/test_coded_sidecar.py::test_kept_codes_are_all_that_is_held",
            "tests/test_coded_sidecar.py::test_kept_codes_stay_when_the_model_is_cast_or_copied",
        ),
    ),
    Row(
        "codes kept in memory",
        "rows inside of a block take the scales of the first",
        (("mla_convert.patches.unpacking:dequantize_rows", scales_of_the_first),),
        ("tests/test_coded.py::test_kept_codes_against_float64[fp8 in blocks of 128x128-key-torch.float32-odd]",),
    ),
)

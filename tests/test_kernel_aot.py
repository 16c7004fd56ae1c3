"""The decode kernel compiled ahead of time for every GPU: memory, spills, instructions and loads of every tile."""

from __future__ import annotations

import itertools

import aot
import decode_aot
import machine_code
import pytest
from decode_aot import Problem

from mla_convert.kernels.tiles import MMA_SYNC, choose_tile, tiles_of
from mla_convert.patches.cache_formats import parse_cache
from mla_convert.patches.cache_rows import code_dtype

#: One problem per target for the quick tests, taking turns through formats, variants and row counts.
QUICK = {
    "sm_80": (Problem(variant="several tokens"), 32),
    "sm_86": (Problem(codes="fp8/group"), 128),
    "sm_89": (Problem("fp16"), 128),
    "sm_90": (Problem(), 128),
    "sm_100": (Problem(codes="fp8/group", variant="indices"), 64),
    "sm_120": (Problem(codes="int8/token", variant="contiguous"), 16),
    "gfx942": (Problem(codes="fp8/tensor"), 32),
    "gfx950": (Problem(variant="masked"), 64),
}


def test_quick_problems_cover_the_targets() -> None:
    assert tuple(QUICK) == aot.TARGETS


@pytest.mark.parametrize("target", aot.TARGETS)
def test_the_report_covers_what_the_product_stores(target: str) -> None:
    """Every format for every dtype of queries, FP8 of the kind that the product stores, the same on every device."""
    covered = set(decode_aot.problems(target))
    for dtype, wide, codes in itertools.product(decode_aot.DTYPES, (512, 1024), ("plain", *decode_aot.FORMATS)):
        assert Problem(dtype, wide, codes=codes) in covered
    assert Problem(codes="fp8/group", variant="flashmla") in covered
    for name in ("fp8", "int8"):
        stored = decode_aot.arguments(Problem(codes=f"{name}/token")).latent.dtype
        assert stored == code_dtype(parse_cache(f"latent:{name}"))
    assert any(problem.codes.startswith("fp8fnuz") for problem in covered) == (target == "gfx942")


def test_one_tile_for_each_target() -> None:
    chosen = []
    for target, (problem, rows) in QUICK.items():
        query = decode_aot.DTYPES[problem.dtype].itemsize
        tile = choose_tile(
            target, rows, problem.latent, problem.rope, query_bytes=query, cache_bytes=problem.cache_bytes
        )
        chosen.append((problem, target, tile))
    built = aot.compile_all(decode_aot.part_request(*case) for case in chosen)
    found = {
        target: decode_aot.faults(*case, result) for case, target, result in zip(chosen, QUICK, built, strict=True)
    }
    assert not any(found.values()), list(zip(found.items(), built, strict=True))


def test_joining_parts() -> None:
    problem, tile = Problem(), choose_tile("sm_90", 128, 512, 64, query_bytes=2, cache_bytes=2)
    (built,) = aot.compile_all([decode_aot.join_request(problem, "sm_90", tile)], processes=1)
    assert built.spills == 0 and built.shared <= 1024 and built.wide_loads


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_joining_parts_for_every_target(target: str) -> None:
    wanted = []
    for problem in (Problem(), Problem("fp32", 1024), Problem("fp16", variant="masked"), Problem(variant="indices")):
        sizes = {"query_bytes": decode_aot.DTYPES[problem.dtype].itemsize, "cache_bytes": problem.cache_bytes}
        tile = choose_tile(target, 128, problem.latent, problem.rope, **sizes)
        wanted.append(decode_aot.join_request(problem, target, tile))
    for built in aot.compile_all(wanted):
        assert built.spills == 0 and built.shared <= 1024 and built.wide_loads


def test_problems_without_wide_instructions_are_named() -> None:
    """The bar asks by rows, not by what a tile happens to be; what is excused has a reason, and tiles that need it."""
    for (target, kind), (most, reason) in MMA_SYNC.items():
        assert len(reason) > 40
        excused = [tile for rows, tile in tiles_of(target, kind) if min(rows, 128) <= most]
        assert excused and not any(tile.transposed or tile.block_rows >= 64 for tile in excused)
    asked = decode_aot.matrix_instruction
    assert [asked("sm_90", "plain", rows) for rows in (16, 32, 128)] == ["HGMMA"] * 3
    assert [asked("sm_90", "coded", rows) for rows in (16, 32, 128)] == ["HMMA", "HMMA", "HGMMA"]
    assert [asked("sm_100", "coded", rows) for rows in (16, 128)] == ["HMMA", "UTC"]
    assert asked("sm_90", "wide", 128) == asked("sm_100", "wide coded", 128) == asked("sm_80", "plain", 128) == "HMMA"


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_tile(target: str) -> None:
    """Each with every dtype and format; ``make kernel-report`` compiles all combinations."""
    cases = decode_aot.spread(target)
    built = aot.compile_all(decode_aot.part_request(problem, target, tile) for problem, tile in cases)
    missed = [
        (str(problem), tile, found)
        for (problem, tile), result in zip(cases, built, strict=True)
        if (found := decode_aot.faults(problem, target, tile, result))
    ]
    assert not missed


SASS = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], [R2.64] ;
        /*0040*/              @P1  BRA 0x90 ;
        /*0050*/                   LDL R2, [R1] ;
        /*0060*/              @P0  BRA 0x10 ;
        /*0070*/                   LDL R9, [R1+0x4] ;
        /*0080*/                   EXIT ;
        /*0090*/                   STL [R1+0x8], R3 ;
        /*00a0*/                   BRA 0x50 ;
        /*00b0*/                   STL [R1+0xc], R3 ;
        /*00c0*/              @P0  BRA 0xb0 ;
        /*00d0*/                   BRA 0xd0 ;
"""
AMD = """
        scratch_store_dword off, v1, off
.LBB0_1:
        global_load_dwordx4 v[2:5], v1, s[0:1]
        global_load_ubyte v6, v1, s[0:1]
        v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]
        scratch_load_dword v1, off, off
        s_cbranch_scc1 .LBB0_1
        scratch_load_dword v1, off, off
        s_endpgm
"""


def test_reading_loops() -> None:
    """What was moved behind the end counts where it returns to; loops without products and what is outside don't."""
    assert machine_code.read_loops(SASS) == machine_code.Loops(spills=2, loads={16: 2})
    assert machine_code.read_loops(AMD) == machine_code.Loops(spills=1, loads={16: 1, 1: 1})

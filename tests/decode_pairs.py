"""Cases that bring together what ``decode_cases.HOSTILE`` and its like don't: each two choices of a call meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from decode_cases import Case

HALF = torch.float16
#: Found by covering greedily the pairs that other cases leave; :func:`unmet` says whether any is left.
PAIRS = [
    Case(layout="strided", dtype=HALF, codes="fp8/tensor", masked=True, indices=17, sinks=True, lens=(0, 40), heads=5),
    Case(layout="separate", dtype=HALF, codes="int8/group", masked=True, indices=17, sinks=True, lens=(0, 40), heads=1),
    Case(layout="paged", page=9, dtype=HALF, codes="int8/tensor", masked=True, indices=17, sinks=True, lens=(0, 40)),
    Case(layout="strided", dtype=HALF, codes="fp8/token", masked=True, indices=17, sinks=True, lens=(0, 40), heads=17),
    Case(
        layout="strided",
        dtype=HALF,
        codes="int8/token",
        masked=True,
        indices=17,
        sinks=True,
        q_len=2,
        lens=(40, 17),
        heads=2,
    ),
    Case(layout="strided", codes="fp8/group", masked=True, lens=(0, 40), heads=6),
    Case(layout="paged", page=1, dtype=HALF, codes="int8/group", q_len=2, lens=(0, 40), heads=4),
    Case(layout="paged", page=33, dtype=HALF, codes="fp8/tensor", masked=True, lens=(40, 17)),
    Case(layout="separate", codes="int8/tensor", sinks=True, lens=(0, 40), heads=1),
    Case(layout="separate", dtype=HALF, codes="fp8/token", sinks=True, q_len=3, lens=(40, 17), heads=5),
    Case(layout="separate", codes="int8/token", masked=True, indices=17, lens=(0, 40)),
    Case(layout="strided", dtype=HALF, codes="int8/group", sinks=True, q_len=3, lens=(0, 40), heads=2),
    Case(layout="paged", codes="fp8/token", q_len=2, lens=(40, 17), heads=7),
    Case(
        layout="separate", dtype=HALF, codes="fp8/tensor", masked=True, indices=17, sinks=True, lens=(40, 17), heads=16
    ),
    Case(layout="strided", dtype=HALF, codes="int8/tensor", indices=17, lens=(40, 17), heads=5),
    Case(layout="separate", dtype=HALF, codes="fp8/group", indices=17, q_len=3, lens=(0, 40)),
]


def choices(case: Case) -> dict[str, Any]:
    """What a caller chooses, by name."""
    return {
        "masked": case.masked,
        "indices": case.indices > 0,
        "sinks": case.sinks,
        "an empty sequence": 0 in case.lens,
        "several new tokens": case.q_len > 1,
        "layout": case.layout,
        "dtype": case.dtype,
        "codes": case.codes,
    }


def unmet(cases: Iterable[Case]) -> Iterator[str]:
    """Two choices, of all that the cases make, that no case makes together; a joint cache has no codes."""
    made = [choices(case) for case in cases]
    for one, other in itertools.combinations(made[0], 2):
        met = {(case[one], case[other]) for case in made}
        for pair in itertools.product(*(dict.fromkeys(case[name] for case in made) for name in (one, other))):
            if pair not in met and not ((one, other) == ("layout", "codes") and pair[0] == "joint"):
                yield f"{one} {pair[0]}, {other} {pair[1]}"

"""What compiled kernels do in their loops: read from NVIDIA's SASS (cuobjdump) and from AMD's assembly."""

from __future__ import annotations

import dataclasses
import re

_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;")
_JUMP = re.compile(r"\b(?:BRA|CALL)\b.*?0x([0-9a-f]+)")
_PRODUCT = re.compile(r"\b(HGMMA|UTC[A-Z]*MMA|HMMA|FFMA|v_mfma|v_fma|v_pk_fma|v_dot)")
_SPILL = re.compile(r"\b(STL|LDL|scratch_load|scratch_store)")
_LOAD = re.compile(r"\b(LDG|LDGSTS)\b(\S*)|\b(?:global|buffer)_load_(\S+)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


@dataclasses.dataclass(frozen=True)
class Loops:
    """The instructions of all loops that multiply: how many move spilled registers, and global loads by bytes."""

    spills: int
    loads: dict[int, int]


def read_loops(text: str) -> Loops:
    """The loops of a kernel's SASS or AMD assembly.

    A loop is what can reach itself again, wherever it stands: rarely executed parts are moved behind the end.
    """
    code, successors = _sass(text) if _SASS.search(text) else _amd(text)
    inside: set[int] = set()
    for component in _components(successors):
        again = len(component) > 1 or component[0] in successors[component[0]]
        if again and any(_PRODUCT.search(code[i]) for i in component):
            inside.update(component)
    loads: dict[int, int] = {}
    for i in inside:
        if found := _LOAD.search(code[i]):
            width = _width(found)
            loads[width] = loads.get(width, 0) + 1
    return Loops(sum(bool(_SPILL.search(code[i])) for i in inside), loads)


def _width(load: re.Match[str]) -> int:
    if load[3]:
        kind = load[3].removeprefix("lds_")
        return _AMD_WIDTHS.get(kind, 1 if "byte" in kind else 2)
    return next((_WIDTHS[part] for part in load[2].split(".") if part in _WIDTHS), 4)


def _sass(text: str) -> tuple[list[str], list[list[int]]]:
    lines = [(int(address, 16), code) for address, code in _SASS.findall(text)]
    places = {address: i for i, (address, _) in enumerate(lines)}
    successors = []
    for i, (_, code) in enumerate(lines):
        conditional = code.startswith("@") or re.search(r"\bBRA\S* !?U?P\d", code)
        ends = re.search(r"\b(EXIT|RET|BRA)\b", code) and not conditional
        jump = _JUMP.search(code)
        targets = [places[int(jump[1], 16)]] if jump else []
        successors.append(targets if ends or i + 1 == len(lines) else [*targets, i + 1])
    return [code for _, code in lines], successors


def _amd(text: str) -> tuple[list[str], list[list[int]]]:
    code = [line.strip() for line in text.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(code) if line.startswith(".LBB")}
    successors = []
    for i, line in enumerate(code):
        jump = re.match(r"s_c?branch\S*\s+(\.LBB\w+)", line)
        targets = [labels[jump[1]]] if jump else []
        ends = re.match(r"s_branch|s_endpgm", line) or i + 1 == len(code)
        successors.append(targets if ends else [*targets, i + 1])
    return code, successors


def _components(successors: list[list[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    order, low = [0] * len(successors), [0] * len(successors)
    stack: list[int] = []
    waiting: set[int] = set()
    found: list[list[int]] = []
    count = 0
    for root in range(len(successors)):
        path = [] if order[root] else [(root, iter(successors[root]))]
        while path:
            node, rest = path[-1]
            if not order[node]:
                count += 1
                order[node] = low[node] = count
                stack.append(node)
                waiting.add(node)
            for after in rest:
                if not order[after]:
                    path.append((after, iter(successors[after])))
                    break
                if after in waiting:
                    low[node] = min(low[node], order[after])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    at = stack.index(node)
                    found.append(stack[at:])
                    waiting.difference_update(stack[at:])
                    del stack[at:]
    return found

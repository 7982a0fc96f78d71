"""Compilation for GPUs that are not there: toy kernels, so that nothing here depends on what the real ones do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kvattention.gpu import compile as aot
from kvattention.gpu.compile import CompileError, Cubin, KernelSet, Source, compile_all, source, write_cubins
from kvattention.gpu.limits import LIMITS, limits
from kvattention.gpu.variants import MOVE, SMS, Variant

TOYS = """
import os
import triton
import triton.language as tl

@triton.jit
def scaled(x, address, y, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(address).to(tl.pointer_type(tl.int32))
    value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32) * scale + tl.load(words + i, mask=i < n, other=0)
    tl.store(y + i, value.to(tl.float16), mask=i < n)

@triton.jit
def hungry(x, y, n):
    rows = tl.arange(0, 64)
    square = rows[:, None] * 64 + rows[None, :]
    a = tl.load(x + square)
    sums = tl.zeros((64, 64), tl.float32)
    for i in range(n):
        sums += tl.load(x + i + rows)[:, None] * a
    tl.store(y + square, sums + tl.trans(a))

@triton.jit
def move(arena, moves, words, WORDS: tl.constexpr):
    base = tl.load(arena).to(tl.pointer_type(tl.int32))
    i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(base + tl.load(moves + 1) + i, tl.load(base + tl.load(moves) + i, mask=i < words), mask=i < words)

@triton.jit
def wrong(x, n):
    tl.store(x + no_such_name, n)

def dies(x):
    pass

def __getattr__(name):
    if name == "tight":  # the assembler's reports of three attempts, the first two of which spill
        reports = iter([(96, 16), (128, 4), (160, 0)])
        __import__("sys").modules["__main__"]._resources = lambda cubin, entry: next(reports)
        return scaled
    if name == "fatal":
        print("the compiler fell over", file=__import__("sys").stderr, flush=True)
        os._exit(3)
    raise AttributeError(name)
"""
SCALED = (("x", "*fp16"), ("address", "*i64"), ("y", "*fp16"), ("n", "i32"), ("scale", "fp32"))


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "toy_kernels.py").write_text(TOYS)
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(aot, "KERNELS", "toy_kernels")
    return "toy_kernels"


def toy(function: str, arguments: aot.Arguments = SCALED, sm: int = 89, warps: int = 4, **constants: object) -> Source:
    return Source(function, "toy_kernels", function, arguments, constants, warps, 2, sm)


def one(wanted: Source) -> Cubin:
    (result,) = compile_all([wanted], workers=1)
    assert isinstance(result, Cubin), result
    return result


def test_every_architecture_compiles_to_machine_code_of_its_own():
    seen = []
    wanted = [toy("scaled", sm=sm, BLOCK=1024) for sm in SMS]
    cubins = compile_all(wanted, progress=lambda done, total, name: seen.append((done, total, name)))
    assert seen == [(done, len(SMS), "scaled") for done in range(1, len(SMS) + 1)]
    assert len({cubin.sha256 for cubin in cubins if isinstance(cubin, Cubin)}) == len(SMS)
    for sm, cubin in zip(SMS, cubins, strict=True):
        assert isinstance(cubin, Cubin), cubin
        assert cubin.image[:4] == b"\x7fELF"
        # Triton 3.9 ends every entry's parameters with pointers to global and profile scratch memory.
        assert (cubin.sm, cubin.entry, cubin.hidden) == (sm, "scaled", ("*i8", "*i8"))
        assert (cubin.arguments, cubin.num_warps, cubin.shared, cubin.spilled) == (SCALED, 4, 0, 0)
        assert 8 < cubin.registers < 64


def test_bytes_depend_on_neither_caches_nor_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = one(toy("scaled", BLOCK=512))
    there = tmp_path / "a" / "longer" / "path"
    there.mkdir(parents=True)
    (there / "toy_kernels.py").write_text("\n\n" + TOYS)
    monkeypatch.syspath_prepend(there)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("PTXAS_OPTIONS", "--opt-level=0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert one(toy("scaled", BLOCK=512)).image == first.image
    assert str(tmp_path).encode() not in first.image
    assert one(toy("scaled", BLOCK=256)).image != first.image


def test_registers_in_local_memory_are_seen():
    arguments = (("x", "*fp32"), ("y", "*fp32"), ("n", "i32"))
    starved = one(toy("hungry", arguments, warps=1))
    assert starved.spilled > 0
    assert starved.shared > 0
    assert one(toy("hungry", arguments, warps=16)).spilled == 0


def test_kernels_that_spill_are_given_more_registers():
    tight = one(dataclasses.replace(toy("tight", BLOCK=512), name="scaled"))
    assert (tight.registers, tight.spilled) == (160, 0)
    assert tight.image != one(toy("scaled", BLOCK=512)).image  # what the assembler was told is in it


def test_failures_name_the_kernel_and_leave_the_others_alone():
    wanted = [
        toy("wrong", (("x", "*i32"), ("n", "i32"))),
        toy("fatal"),
        toy("scaled", (*SCALED[:4], ("skale", "fp32")), BLOCK=64),
        toy("scaled", (SCALED[1], SCALED[0], *SCALED[2:]), BLOCK=64),
        toy("scaled", BLOCK=64),
    ]
    wrong, fatal, misnamed, misordered, right = compile_all(wanted, workers=1)
    assert isinstance(wrong, CompileError)
    assert "wrong for compute capability 89" in str(wrong)
    assert "no_such_name" in str(wrong)
    assert isinstance(fatal, CompileError)
    assert "exit status 3" in str(fatal)
    assert "fell over" in str(fatal)
    assert isinstance(misnamed, CompileError)
    assert "['scale', 'skale']" in str(misnamed)
    assert isinstance(misordered, CompileError)
    assert "order" in str(misordered)
    assert isinstance(right, Cubin)


def test_a_folder_of_kernels_comes_back_as_written(tmp_path: Path):
    folder = tmp_path / "kernels"
    names = write_cubins(folder, [MOVE, MOVE], 80)
    assert names == ("move.cubin", "kernels.json")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    cubin = KernelSet.open(folder, 80).load(MOVE)
    assert cubin == aot.compile_variant(MOVE, 80)
    assert cubin.arguments == MOVE.arguments
    again = tmp_path / "again"
    write_cubins(again, [MOVE], 80)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_opening_refuses_what_would_not_run(tmp_path: Path):
    folder = tmp_path / "kernels"
    with pytest.raises(ValueError, match=r"lack kernels\.json"):
        KernelSet.open(folder, 80)
    write_cubins(folder, [MOVE], 80)
    with pytest.raises(
        ValueError, match=r"are for compute capability 80, but this GPU's is 89; build the engine for 89"
    ):
        KernelSet.open(folder, 89)
    kernels = KernelSet.open(folder, 80)
    with pytest.raises(ValueError, match=r"lack merge-f16-d64-m16; they hold move; build the engine again"):
        kernels.load(Variant("merge", "f16", head_dim=64, rows=16))
    index = json.loads((folder / "kernels.json").read_text())
    index["kernels"]["move"]["arguments"][2][1] = "i64"
    (folder / "kernels.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="another version"):
        KernelSet.open(folder, 80).load(MOVE)
    (folder / "move.cubin").write_bytes(b"\x7fELF")
    with pytest.raises(ValueError, match=r"move.cubin is damaged"):
        kernels.load(MOVE)
    index["format"] = 0
    (folder / "kernels.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="format 0, expected 1"):
        KernelSet.open(folder, 80)


def test_fp8_queries_need_their_tensor_cores():
    variant = Variant("attend", "f16", "e4m3", "e4m3", 64, 32, 16, fp8_query=True)
    with pytest.raises(ValueError, match="q8 needs compute capability 89 or later, got 86"):
        source(variant, 86)
    assert source(variant, 89).constants["FP8_QUERY"] is True


def test_every_architecture_has_limits():
    assert tuple(LIMITS) == SMS
    with pytest.raises(ValueError, match="capability 75 is not supported; use one of 80, 86, 89, 90, 120"):
        limits(75)


@pytest.mark.parametrize(
    ("sm", "registers", "shared", "num_warps", "blocks"),
    [
        (80, 32, 0, 4, 16),  # 64 warps
        (80, 128, 0, 4, 4),  # 65536 / (128 * 128)
        (80, 255, 0, 8, 1),  # 256 registers a thread: two warps a partition, eight in all
        (80, 32, 81 * 1024, 4, 2),  # twice 82 KiB, the system's one included
        (89, 32, 99 * 1024, 4, 1),
        (89, 32, 99 * 1024 + 1, 4, 0),  # more than a block may have
        (86, 32, 0, 1, 16),  # blocks
        (89, 32, 0, 1, 24),
        (90, 168, 0, 4, 3),  # 168 * 32 rounds up to 5376; 3 warps a partition
    ],
)
def test_resident_blocks(sm: int, registers: int, shared: int, num_warps: int, blocks: int):
    limit = limits(sm)
    assert limit.resident_blocks(registers=registers, shared=shared, num_warps=num_warps) == blocks
    occupancy = limit.occupancy(registers=registers, shared=shared, num_warps=num_warps)
    assert occupancy == blocks * num_warps / limit.warps


def test_a_source_is_plain_data():
    wanted = source(MOVE, 120)
    assert Source(**json.loads(json.dumps(dataclasses.asdict(wanted))) | {"arguments": MOVE.arguments}) == wanted

"""What one multiprocessor of each supported GPU generation holds, and how many blocks of a kernel fit into it.

A static estimate from compiled resource usage: it says what is resident at most, nothing about speed.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
REGISTERS = 65536
"""32-bit registers of a multiprocessor, in every generation here."""

REGISTERS_PER_WARP_STEP = 256
SHARED_STEP = 128
SHARED_RESERVED = 1 * KIB
"""The system's own shared memory in every block, from compute capability 8.0 on."""


@dataclass(frozen=True)
class Limits:
    """Of one compute capability: bytes of shared memory a block may ask for and a multiprocessor has, and counts."""

    shared_per_block: int
    shared: int
    warps: int
    blocks: int

    def resident_blocks(self, *, registers: int, shared: int, num_warps: int) -> int:
        """Blocks of a kernel that fit into one multiprocessor at once; 0 when even one does not."""
        if shared > self.shared_per_block:
            return 0
        per_warp = _round_up(max(registers, 1) * 32, REGISTERS_PER_WARP_STEP)
        # Registers lie in four partitions, and a warp's registers in one of them.
        by_registers = REGISTERS // 4 // per_warp * 4 // num_warps
        by_shared = self.shared // _round_up(shared + SHARED_RESERVED, SHARED_STEP)
        return min(by_registers, by_shared, self.warps // num_warps, self.blocks)

    def occupancy(self, *, registers: int, shared: int, num_warps: int) -> float:
        """Resident warps over the most there can be."""
        return self.resident_blocks(registers=registers, shared=shared, num_warps=num_warps) * num_warps / self.warps


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (shared memory, warps, blocks);
# cuda_occupancy.h of CUDA 13.0 (blocks of 12.0, and the allocation steps above).
LIMITS: dict[int, Limits] = {
    80: Limits(shared_per_block=163 * KIB, shared=164 * KIB, warps=64, blocks=32),
    86: Limits(shared_per_block=99 * KIB, shared=100 * KIB, warps=48, blocks=16),
    89: Limits(shared_per_block=99 * KIB, shared=100 * KIB, warps=48, blocks=24),
    90: Limits(shared_per_block=227 * KIB, shared=228 * KIB, warps=64, blocks=32),
    120: Limits(shared_per_block=99 * KIB, shared=100 * KIB, warps=48, blocks=24),
}


def limits(sm: int) -> Limits:
    """Raises ValueError for a compute capability that no kernel is compiled for."""
    if sm not in LIMITS:
        raise ValueError(f"compute capability {sm} is not supported; use one of {', '.join(map(str, LIMITS))}")
    return LIMITS[sm]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step

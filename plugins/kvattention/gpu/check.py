"""The static check of the GPU kernels: compile every listed variant for every architecture, and judge what came out.

    python -m kvattention.gpu.check [--sm 80,89] [--variants REGEX] [--out FILE] [--markdown docs/kernels.md]

A kernel that needs more shared memory than a block of the GPU can have does not launch; one that spills registers is
slow in a way that no test of results shows. Both are breaches, as is a kernel that does not compile; the exit status is
then 1. Occupancy is an upper bound from resources alone. Needs Triton, no GPU; nothing is run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvattention.codec import CODECS
from kvattention.gpu.compile import CompileError, Cubin, compile_all, source
from kvattention.gpu.limits import KIB, limits
from kvattention.gpu.variants import SMS, VARIANTS, Variant
from kvattention.layout import RecordLayout

MARKDOWN_BEGIN = "<!-- begin: python -m kvattention.gpu.check --markdown -->"
MARKDOWN_END = "<!-- end -->"


@dataclass(frozen=True)
class Checked:
    """One variant on one architecture."""

    variant: str
    kernel: str
    sm: int
    verdict: str
    """ok; breach; or "not for this SM", which has none of what follows."""
    reason: str = ""
    shared: int = 0
    shared_limit: int = 0
    registers: int = 0
    spilled: int = 0
    num_warps: int = 0
    occupancy: float = 0.0
    """Resident warps over the most that a multiprocessor holds, at most."""
    bytes_per_token: float | None = None
    """attend: bytes of the cold record that it reads for a token of one KV head, K and V."""


def check(variants: Sequence[Variant], sms: Sequence[int], progress: Progress | None = None) -> list[Checked]:
    """Every variant on every architecture, in this order."""
    pairs = [(variant, sm) for variant in variants for sm in sms]
    fits = [(variant, sm) for variant, sm in pairs if sm >= variant.min_sm]
    results = compile_all([source(*pair) for pair in fits], progress=progress)
    compiled = dict(zip(fits, results, strict=True))
    return [judge(variant, sm, compiled.get((variant, sm))) for variant, sm in pairs]


def judge(variant: Variant, sm: int, result: Cubin | CompileError | None) -> Checked:
    """None: it was not compiled, which is right below `Variant.min_sm` only."""
    if result is None:
        if sm < variant.min_sm:
            return Checked(variant.name, variant.kernel, sm, "not for this SM", f"from SM{variant.min_sm} on")
        return Checked(variant.name, variant.kernel, sm, "breach", "missing")
    if isinstance(result, CompileError):
        return Checked(variant.name, variant.kernel, sm, "breach", str(result))
    limit = limits(sm)
    breaches = []
    if result.shared > limit.shared_per_block:
        breaches.append(f"{result.shared:,} bytes of shared memory, a block may have {limit.shared_per_block:,}")
    if result.spilled:
        breaches.append(f"{result.spilled:,} bytes of registers spilled")
    use = {"registers": result.registers, "shared": result.shared, "num_warps": result.num_warps}
    if not breaches and not limit.resident_blocks(**use):
        breaches.append(f"{result.registers} registers of {result.num_warps} warps do not fit a multiprocessor")
    return Checked(
        variant=variant.name,
        kernel=variant.kernel,
        sm=sm,
        verdict="breach" if breaches else "ok",
        reason="; ".join(breaches),
        shared_limit=limit.shared_per_block,
        spilled=result.spilled,
        occupancy=round(limit.occupancy(**use), 4),
        bytes_per_token=bytes_per_token(variant),
        **use,
    )


def bytes_per_token(variant: Variant) -> float | None:
    if variant.kernel != "attend":
        return None
    record = RecordLayout(CODECS[variant.k], CODECS[variant.v], 1, variant.head_dim, variant.group_size)
    return record.bytes / variant.group_size


def table(checked: Iterable[Checked]) -> str:
    """For people, a line for each."""
    lines = [
        f"{'variant':<42} {'SM':>3} {'shared':>8} {'limit':>8} {'regs':>5} {'spill':>6} {'warps':>5} {'occ.':>5}  "
    ]
    for one in checked:
        numbers = ""
        if one.shared_limit:
            numbers = (
                f"{one.shared:>8,} {one.shared_limit:>8,} {one.registers:>5} {one.spilled:>6,} "
                f"{one.num_warps:>5} {one.occupancy:>5.0%}  "
            )
        words = one.verdict + (f": {one.reason.splitlines()[-1]}" if one.reason else "")
        lines.append(f"{one.variant:<42} {one.sm:>3} {numbers}{words}")
    return "\n".join(line.rstrip() for line in lines)


def markdown(checked: Sequence[Checked]) -> str:
    """A row for each variant, a column for each architecture: registers, KiB of shared memory, occupancy.

    Variants in bfloat16, which are much like those in float16, have rows only where there is a breach.
    """
    sms = sorted({one.sm for one in checked})
    rows: dict[str, list[Checked]] = {}
    for one in checked:
        rows.setdefault(one.variant, []).append(one)
    for name, ones in list(rows.items()):
        if "-bf16" in name and all(one.verdict != "breach" for one in ones):
            del rows[name]
    lines = ["| kernel | bytes/token | " + " | ".join(f"SM{sm}" for sm in sms) + " |"]
    lines.append("|---|---:|" + "---:|" * len(sms))
    for name, ones in rows.items():
        cells = {one.sm: _cell(one) for one in ones}
        size = next((f"{one.bytes_per_token:g}" for one in ones if one.bytes_per_token is not None), "")
        lines.append(f"| {name} | {size} | " + " | ".join(cells.get(sm, "") for sm in sms) + " |")
    return "\n".join(lines)


def _cell(one: Checked) -> str:
    if one.verdict == "not for this SM":
        return "–"
    if not one.shared_limit:
        return "**does not compile**"
    cell = f"{one.registers} · {one.shared / KIB:.3g} · {one.occupancy:.0%}"
    return f"**{cell}: {one.reason}**" if one.verdict == "breach" else cell


def write_markdown(path: Path, checked: Sequence[Checked]) -> None:
    """Put the table between the page's two markers. Raises ValueError when they are not there."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(MARKDOWN_BEGIN)
    _, end, after = rest.partition(MARKDOWN_END)
    if not begin or not end:
        raise ValueError(
            f"{path} lacks the lines {MARKDOWN_BEGIN!r} and {MARKDOWN_END!r}, between which the table goes"
        )
    path.write_text(f"{before}{begin}\n\n{markdown(checked)}\n\n{end}{after}", encoding="utf-8")


class Progress:
    """One line on standard error: rewritten on a terminal, every tenth elsewhere."""

    def __init__(self) -> None:
        self._tenths = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[Kcompiling kernels {done}/{total} {name}", end="", file=sys.stderr, flush=True)
            if done == total:
                print(file=sys.stderr)
        elif 10 * done // total > self._tenths:
            self._tenths = 10 * done // total
            print(f"compiling kernels {done}/{total}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvattention.gpu.check", description="Compile and judge all kernels."
    )
    parser.add_argument(
        "--sm", default=",".join(map(str, SMS)), help="architectures, with commas (default: %(default)s)"
    )
    parser.add_argument("--variants", default="", metavar="REGEX", help="only variants whose name matches")
    parser.add_argument("--out", type=Path, default=Path("reports/kernels.json"), help="default: %(default)s")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="also put the table into this page")
    options = parser.parse_args(arguments)
    try:
        sms = [int(sm) for sm in options.sm.split(",")]
        for sm in sms:
            limits(sm)
        chosen = [variant for variant in VARIANTS if re.search(options.variants, variant.name)]
    except (ValueError, re.error) as error:
        parser.error(str(error))
    if not chosen:
        parser.error(f"no variant matches {options.variants!r}; they are called {VARIANTS[0].name} and the like")
    checked = check(chosen, sms, Progress())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(one) for one in checked], indent=1) + "\n", encoding="utf-8")
    print(table(checked))
    if options.markdown is not None:
        write_markdown(options.markdown, checked)
    breaches = [one for one in checked if one.verdict == "breach"]
    for one in breaches:
        print(f"breach: {one.variant} on SM{one.sm}: {one.reason}", file=sys.stderr)
    within = sum(one.verdict == "ok" for one in checked)
    print(f"{within} kernels within their limits, {len(breaches)} breaches; all of it: {options.out}")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())

"""The static check: what it judges a breach, and what it writes. Only toy results here, and one real kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from kvattention.gpu import check as check_module
from kvattention.gpu.check import MARKDOWN_BEGIN, MARKDOWN_END, Checked, bytes_per_token, judge, main, markdown, table
from kvattention.gpu.compile import CompileError, Cubin, Source
from kvattention.gpu.variants import MOVE, SMS, VARIANTS, Variant

ATTEND = Variant("attend", "f16", "int4", "int2", 64, 32, 16)
FP8 = Variant("attend", "f16", "e4m3", "e4m3", 64, 32, 16, fp8_query=True)


def cubin(variant: Variant, sm: int, **changes: Any) -> Cubin:
    fields = {"num_warps": 4, "shared": 1024, "registers": 64, "spilled": 0} | changes
    return Cubin(
        name=variant.name,
        sm=sm,
        entry=variant.kernel,
        arguments=variant.arguments,
        hidden=(),
        triton="3.9.0",
        image=b"",
        **fields,
    )


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], Any]:
    """What compiling gives for (variant, SM); small kernels for those not named."""
    results: dict[tuple[str, int], Any] = {}

    def compile_all(sources: list[Source], progress: Any) -> list[Any]:
        made = []
        for index, wanted in enumerate(sources):
            variant = next(v for v in VARIANTS if v.name == wanted.name)
            made.append(results.get((wanted.name, wanted.sm), cubin(variant, wanted.sm)))
            progress(index + 1, len(sources), wanted.name)
        return made

    monkeypatch.setattr(check_module, "compile_all", compile_all)
    return results


@pytest.mark.parametrize(
    ("changes", "sm", "reason"),
    [
        ({}, 80, ""),
        ({"shared": 99 * 1024}, 89, ""),
        ({"shared": 99 * 1024 + 1}, 89, "101,377 bytes of shared memory, a block may have 101,376"),
        ({"shared": 99 * 1024 + 1}, 80, ""),
        ({"shared": 164 * 1024}, 80, "167,936 bytes of shared memory, a block may have 166,912"),
        ({"shared": 164 * 1024}, 90, ""),
        ({"spilled": 8}, 80, "8 bytes of registers spilled"),
        ({"registers": 255, "num_warps": 16}, 80, "255 registers of 16 warps do not fit a multiprocessor"),
    ],
)
def test_breaches(changes: dict[str, int], sm: int, reason: str):
    one = judge(ATTEND, sm, cubin(ATTEND, sm, **changes))
    assert (one.verdict, one.reason) == ("breach" if reason else "ok", reason)


def test_missing_kernels_and_compile_errors_are_breaches():
    assert judge(ATTEND, 80, None).reason == "missing"
    error = judge(ATTEND, 80, CompileError("no such thing"))
    assert (error.verdict, error.reason) == ("breach", "no such thing")
    assert judge(FP8, 86, None).verdict == "not for this SM"
    assert judge(FP8, 89, None).verdict == "breach"


def test_bytes_per_token_are_the_records():
    # K: 64 channels of 4 bits, and 64 parameter words over 32 tokens; V: 64 channels of 2 bits, 2 parameter words.
    assert bytes_per_token(ATTEND) == 32 + 8 + 16 + 8
    assert bytes_per_token(Variant("attend", "f16", "f16", "f16", 64, 32, 16)) == 256
    assert bytes_per_token(MOVE) is None


def test_a_clean_run(compiler: Any, tmp_path: Path, capsys: Any):
    out = tmp_path / "reports" / "kernels.json"
    assert main(["--sm", "80,89", "--variants", "d64-g32-m16", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    names = [variant.name for variant in VARIANTS if "d64-g32-m16" in variant.name]
    assert [(one["variant"], one["sm"]) for one in written] == [(name, sm) for name in names for sm in (80, 89)]
    assert {one["verdict"] for one in written if one["variant"].endswith("q8") and one["sm"] == 80} == {
        "not for this SM"
    }
    first = written[0]
    assert (first["shared"], first["shared_limit"], first["registers"], first["spilled"]) == (1024, 166912, 64, 0)
    assert first["occupancy"] == 0.5
    printed = capsys.readouterr()
    assert "attend-f16-int4-int2-d64-g32-m16" in printed.out
    assert "not for this SM: from SM89 on" in printed.out
    assert "30 kernels within their limits, 0 breaches" in printed.out
    assert "compiling kernels 30/30" in printed.err


def test_breaches_fail_the_run_and_are_named(compiler: Any, tmp_path: Path, capsys: Any):
    compiler[ATTEND.name, 89] = cubin(ATTEND, 89, spilled=16)
    compiler[ATTEND.name, 120] = CompileError("line one\nthe reason")
    out = tmp_path / "kernels.json"
    assert main(["--variants", f"^{ATTEND.name}$", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert "3 kernels within their limits, 2 breaches" in printed.out
    assert f"breach: {ATTEND.name} on SM89: 16 bytes of registers spilled" in printed.err
    assert "breach: the reason" in printed.out
    assert [one["sm"] for one in json.loads(out.read_text())] == list(SMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sm", "75"], "compute capability 75 is not supported"),
        (["--sm", "all"], "invalid literal"),
        (["--variants", "no-such-kernel"], "no variant matches 'no-such-kernel'"),
        (["--variants", "("], "unterminated"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: Any):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_pages_table_is_replaced(compiler: Any, tmp_path: Path):
    page = tmp_path / "kernels.md"
    page.write_text(f"# Kernels\n\n{MARKDOWN_BEGIN}\nold\n{MARKDOWN_END}\n\nMore.\n")
    arguments = ["--sm", "80,89", "--variants", "q8|^move$", "--out", str(tmp_path / "k.json"), "--markdown", str(page)]
    for _ in range(2):
        assert main(arguments) == 0
        text = page.read_text()
        assert text.startswith(f"# Kernels\n\n{MARKDOWN_BEGIN}\n\n| kernel | bytes/token | SM80 | SM89 |\n")
        assert text.endswith(f"|\n\n{MARKDOWN_END}\n\nMore.\n")
        assert "| attend-f16-e4m3-e4m3-d64-g32-m16-q8 | 128 | – | 64 · 1 · 67% |" in text
        assert "| move |  | 64 · 1 · 50% | 64 · 1 · 67% |" in text
        assert "old" not in text
    page.write_text("# Kernels\n")
    with pytest.raises(ValueError, match="lacks the lines"):
        main(arguments)


def test_breaches_stand_out_in_the_table():
    bad = [judge(ATTEND, 80, cubin(ATTEND, 80, spilled=8)), judge(ATTEND, 89, CompileError("no"))]
    assert "| **64 · 1 · 50%: 8 bytes of registers spilled** | **does not compile** |" in markdown(bad)
    other = Variant("append", "bf16", "int4", "int4", 64, 32)
    assert "append" not in markdown([judge(other, 80, cubin(other, 80))])
    assert "append-bf16" in markdown([judge(other, 80, cubin(other, 80, spilled=8))])
    assert table(bad).splitlines()[2].endswith("breach: no")


def test_as_a_command(tmp_path: Path):
    out = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "kvattention.gpu.check", "--sm", "89", "--variants", "^move$", "--out", str(out)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (one,) = (Checked(**fields) for fields in json.loads(out.read_text()))
    assert (one.variant, one.sm, one.verdict) == ("move", 89, "ok")
    assert one.registers > 8

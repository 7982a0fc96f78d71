"""Progress where there is no terminal: a line a stage, on standard error."""

from __future__ import annotations

import pytest

from lowkv.terminal import StageProgress


def test_a_log_gets_one_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress() as progress:
        progress.begin("converting weights", 100)
        progress.advance(60)
        progress.advance(40)
        for second in range(1, 4):
            progress.begin(f"loading tiny: {second} s")
        progress.begin("hashing")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["converting weights", "loading tiny: 1 s", "hashing"]

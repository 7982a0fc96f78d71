"""The two ways to run a team."""

from __future__ import annotations

import ctypes
import threading

import pytest

from kvattention.cpu import threads


@pytest.mark.parametrize("openmp", [True, False], ids=["openmp", "python"])
def test_every_thread_calls_the_function_once(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "_libgomp", lambda: None)
    elif threads._libgomp() is None:
        pytest.skip("no libgomp on this machine")
    seen: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(argument: int) -> None:
        seen.append((argument, threading.get_ident()))

    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    run = threads.team(address, 3)
    for count in (1, 3, 2):
        seen.clear()
        run(count, 77)
        assert [argument for argument, _ in seen] == [77] * count

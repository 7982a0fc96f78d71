"""Recipe to a running server and back to nothing, by the command line alone, on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

LOWKV = [sys.executable, "-m", "lowkv.cli"]


def lowkv(folder: Path, *arguments: str) -> str:
    done = subprocess.run([*LOWKV, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_build_repo_serve_and_ctrl_c(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(
        f"model: folder:{tiny_checkpoint}\n"
        "kv_cache: {format: kivi2, budget: 8MiB}\n"
        "serving: {max_sequences: 4, max_tokens_per_step: 64}\n"
    )
    assert "next: lowkv repo engines/tiny" in lowkv(tmp_path, "build", "tiny.yaml")
    assert "next: lowkv repo engines/tiny" in lowkv(tmp_path, "build", "tiny.yaml")  # there already: the same words
    assert "next: lowkv serve repos/tiny" in lowkv(tmp_path, "repo", "engines/tiny")

    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    command = [*LOWKV, "serve", "repos/tiny", *ports, "--log", "triton.log"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "tiny is ready (Ctrl-C stops it)\n"
            url = server.stdout.readline().split()[1]
            body = json.dumps({"text_input": "abc", "max_tokens": 4}).encode()
            with urllib.request.urlopen(f"{url}/v2/models/tiny/generate", body, timeout=60) as answer:
                assert "text_output" in json.load(answer)
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait(timeout=60)
    assert code == 130
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/v2/health/live", timeout=5)
    assert (tmp_path / "triton.log").stat().st_size > 0

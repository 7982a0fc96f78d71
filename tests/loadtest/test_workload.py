from __future__ import annotations

from pathlib import Path

import pytest

from lowkv.assets import asset
from lowkv.configfile import ConfigError
from lowkv.errors import LowkvError
from lowkv.loadtest.workload import Lengths, Workload, load_workload, workload_from_mapping

GOOD = """\
prompt_tokens: [100, 200]
output_tokens: 16
levels: [1, 2, 4]
saturation: 8
window_seconds: 5
time_limit_seconds: 60
kv_budget: 64MiB
slo:
  ttft_seconds: 2
  tpot_seconds: 0.2
"""


def load(tmp_path: Path, text: str) -> Workload:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_workload(path)


def test_values_and_defaults(tmp_path: Path) -> None:
    workload = load(tmp_path, GOOD)
    assert workload.name == "mine"
    assert workload.prompt_tokens == Lengths(100, 200)
    assert workload.levels == (1, 2, 4)
    assert workload.kv_budget == 64 * 2**20
    assert workload.tokens == 216
    assert workload.slo.attainment == 0.95
    assert workload.warmup.occupancy == 0.95


def test_mapping_is_the_inverse(tmp_path: Path) -> None:
    workload = load(tmp_path, GOOD)
    assert workload_from_mapping(workload.to_mapping()) == workload


@pytest.mark.parametrize("name", ["demo", "quick", "standard"])
def test_those_that_come_along_are_good(name: str) -> None:
    assert load_workload(asset(f"loadtest/workloads/{name}.yaml")).name == name


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("output_tokens: 16", "output_token: 16", 2, "did you mean output_tokens?"),
        ("output_tokens: 16", "output_tokens: 1", 2, "output_tokens is out of range: got 1"),
        ("[100, 200]", "[200, 100]", 1, "prompt_tokens is an empty range"),
        ("[100, 200]", "long", 1, "prompt_tokens has the wrong type"),
        ("[1, 2, 4]", "[1, 4, 2]", 3, "levels must rise"),
        ("[1, 2, 4]", "[]", 3, "levels is empty"),
        ("saturation: 8", "saturation: 2", 4, "saturation is not the largest level"),
        ("window_seconds: 5", "window_seconds: 0", 5, "window_seconds is out of range"),
        ("64MiB", "64M", 7, "kv_budget is not a size"),
        ("  ttft_seconds: 2", "  ttft_second: 2", 9, "did you mean ttft_seconds?"),
        ("  tpot_seconds: 0.2", "  tpot_seconds: 0.2\n  attainment: 2", 11, "slo.attainment is out of range"),
    ],
)
def test_what_is_refused_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert said in str(caught.value)
    assert f"line {line}" in str(caught.value)


def test_a_missing_key_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output_tokens is missing"):
        load(tmp_path, GOOD.replace("output_tokens: 16\n", ""))
    with pytest.raises(LowkvError, match="cannot read workload"):
        load_workload(tmp_path / "nothing.yaml")

"""Files of ``flashlane tune`` of another version: what is dropped, what stays, and what a call makes of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from tuner_fakes import ARCH, DEVICE

from flashlane import bench
from flashlane.core import registry, tuned
from flashlane.tuning import stored

pytestmark = pytest.mark.usefixtures("gpu")
SOURCE = "kernels/mma/naive.cu"
NEWER = '{"format": "flashlane-tune/2", "device": "x", "arch": "sm_90a", "entries": {}}'


def entry(tag: str, config: dict, digest: str = "") -> stored.Tuned:
    return stored.Tuned(tag, config, "a problem", 1.0, None, SOURCE, digest or stored.digest_of(SOURCE), "today", {})


def write(*entries: stored.Tuned) -> Path:
    path = stored.path_of(DEVICE, ARCH)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"format": stored.FORMAT, "device": DEVICE, "arch": ARCH}
    body["entries"] = {each.tag: vars(each) for each in entries}
    path.write_text(json.dumps(body), encoding="utf-8")
    return path


def test_forgetting_a_tag_leaves_files_that_cannot_be_read_and_says_so() -> None:
    own = write(entry("mma(naive)", {}))
    other = own.with_name("other-sm_90a.json")
    other.write_text(NEWER, encoding="utf-8")
    with pytest.warns(RuntimeWarning, match=r"leaves .*other-sm_90a\.json, which it cannot read .*flashlane-tune/2"):
        assert stored.forget(["naive"]) == 1
    assert not own.exists() and other.read_text(encoding="utf-8") == NEWER
    assert stored.forget() == 0 and not other.exists(), "without words everything is dropped"


def test_forgetting_a_tag_leaves_other_tags_of_other_device_code_and_counts_its_own() -> None:
    path = write(entry("a", {}, "another"), entry("b", {}, "another"))
    assert stored.forget(["a"]) == 1
    assert list(json.loads(path.read_text(encoding="utf-8"))["entries"]) == ["b"]
    assert stored.forget() == 1 and not path.exists()


def test_a_file_without_a_device_is_damaged() -> None:
    path = write(entry("a", {}), entry("b", {}))
    body = json.loads(path.read_text(encoding="utf-8"))
    del body["device"]
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="KeyError: 'device'"):
        assert stored.load(path) == {}
    with pytest.warns(RuntimeWarning, match="KeyError: 'device'"):
        assert stored.forget(["a"]) == 0


@pytest.mark.parametrize("tag", ["mma(split-q+stage1)", "hopper(wgmma+tma)", "triton"])
def test_fields_that_a_configuration_no_longer_has_are_ignored_with_a_warning(tag: str, monkeypatch) -> None:
    kernel, problem = registry.get(tag), bench.make_problem(1, 8, 1024, 64, arch=ARCH)
    with tuned.heuristics_only():
        heuristic = kernel.config(problem)
    strange = entry(tag, tuned.plain_config(heuristic) | {"renamed_field": 3})
    monkeypatch.setattr(stored, "find", lambda name, _: strange if name == tag else None)
    monkeypatch.setattr(tuned, "_find", lambda: stored.find)
    registry.changed()
    with pytest.warns(RuntimeWarning, match="ignores what another version tuned for .*renamed_field"):
        assert kernel.config(problem) == heuristic
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel.config(problem) == heuristic, "it is warned of once"

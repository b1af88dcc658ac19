"""Where files are written to: through links, and into what is no file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flashlane.core.files import write_atomically, write_named


def test_of_a_link_the_target_is_replaced(tmp_path: Path) -> None:
    """The links are relative, one leads to another, and the target is in another folder."""
    (tmp_path / "kept").mkdir()
    target, link, further = tmp_path / "kept" / "out.json", tmp_path / "out.json", tmp_path / "further.json"
    target.write_text("old, and longer than the new one")
    link.symlink_to(Path("kept") / "out.json")
    further.symlink_to("out.json")
    with target.open() as old:
        for path, text in ((link, "new"), (further, b"newer")):
            write_atomically(path, text)
            assert target.read_bytes() == (text if isinstance(text, bytes) else text.encode())
        assert old.read().startswith("old"), "who reads the file that is replaced reads all of it"
    assert os.readlink(link) == "kept/out.json" and os.readlink(further) == "out.json"
    assert os.listdir(tmp_path / "kept") == ["out.json"] and len(os.listdir(tmp_path)) == 3


def test_a_link_to_nothing_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_written_to(tmp_path: Path, linked: bool) -> None:
    pipe, path, read = tmp_path / "pipe", tmp_path / ("link" if linked else "pipe"), []
    os.mkfifo(pipe)
    if linked:
        path.symlink_to("pipe")
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_atomically(path, "text")
    reader.join(timeout=60)
    assert read == [b"text"] and pipe.is_fifo() and path.is_symlink() == linked


def test_the_standard_output_is_written_to() -> None:
    """``/dev/stdout`` is a link to a pipe that has no name in any folder."""
    imports = "from pathlib import Path; from flashlane.core.files import write_atomically"
    code = f"{imports}; write_atomically(Path('/dev/stdout'), 'ä')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ä".encode(), done.stderr


def test_what_cannot_be_written_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to(Path("absent") / "file")
    for given in ("folder", "link", "absent/file"):
        with pytest.raises(OSError) as caught:
            write_atomically(Path(given), "text")
        assert caught.value.filename == given
    with pytest.raises(ValueError, match="--out is 'folder', which cannot be written: Is a directory"):
        write_named(Path("folder"), "text", "--out")
    assert sorted(os.listdir()) == ["folder", "link"] and not os.listdir("folder")

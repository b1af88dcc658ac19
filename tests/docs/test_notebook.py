"""The example notebook runs from top to bottom, on a CPU, and the Python API that it shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashlane import bench
from flashlane.bench.measure.environment import child_environment

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path, tmp_path):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    body = json.loads(path.read_text(encoding="utf-8"))
    assert body["nbformat"] == 4 and all(cell["id"] for cell in body["cells"])
    cells = ["".join(cell["source"]) for cell in body["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3 and not any(cell["outputs"] for cell in body["cells"] if cell["cell_type"] == "code")
    code = "\n".join(f"exec(compile({cell!r}, 'cell {index}', 'exec'))" for index, cell in enumerate(cells))
    environment = {**child_environment(), "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "on cpu:" in done.stdout, "explain said which kernel it was"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_jupyter_shows_its_tables_and_its_picture(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is in the extra notebooks")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in {**child_environment(), "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error"]
    assert sum("text/html" in output.get("data", {}) for output in shown) == 3, "frames are tables"
    assert "image/png" in shown[-1].data, "the figure is a picture, and not its name"


def test_problems_of_a_notebook():
    found = bench.problems(seqlen=[64, 128], head_dim=(32, 64), dtype=["f16", torch.float32], causal=[False, True])
    assert len(found) == 2**4 and len(set(found)) == 2**4
    assert found[0].describe() == "B1 H8 N64 D32 f16" and found[-1].describe() == "B1 H8 N128 D64 f32 causal"
    (gqa,) = bench.problems(heads=8, kv_heads=2, seqlen=1, seqlen_k=99, dtype="bfloat16")
    assert gqa.describe() == "B1 H8/2 N1x99 D64 bf16"
    with pytest.raises(ValueError, match="dtype has 'f8'"):
        bench.problems(dtype="f8")
    with pytest.raises(ValueError, match="kv_heads is 3"):
        bench.problems(heads=8, kv_heads=3)

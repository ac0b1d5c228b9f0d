"""deploy/trtllm/: a recipe as it is rendered today."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.recipes import read_recipe
from dflash_trt.trtllm.launch import render_folder
from tests.trtllm.test_launch import shellcheck

DEPLOY = Path(__file__).parents[2] / "deploy"
EXAMPLE = "gpt-oss-120b-b300x8-interactive"


def test_the_example_is_what_its_recipe_renders_to():
    folder = DEPLOY / "trtllm" / EXAMPLE
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == render_folder(read_recipe(EXAMPLE)).files, f"render it again: see {DEPLOY / 'README.md'}"
    assert all((folder / file).stat().st_mode & 0o100 for file, text in found.items() if text.startswith("#!"))
    assert f"recipe render {EXAMPLE} --output deploy/trtllm/{EXAMPLE} --force" in (DEPLOY / "README.md").read_text()


def test_every_script_in_deploy_passes_shellcheck():
    scripts = [path for pattern in ("*.sh", "*.sbatch") for path in sorted(DEPLOY.rglob(pattern))]
    assert len(scripts) > 8 and shellcheck(*scripts) == ""

"""The model repository for Triton's llmapi backend, with a model of a few lines in the place of NVIDIA's."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from dflash_trt.document import read_document
from dflash_trt.recipes import read_recipe, recipe_files
from dflash_trt.trtllm.folder import fill_folder
from dflash_trt.trtllm.launch import render_folder
from dflash_trt.trtllm.releases import judge, read_release
from tests.trtllm.test_launch import Launched

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DFLASH_TRT_TRITON_PYTHON") or ROOT / ".venv-triton" / "bin" / "python")
NAME = "gpt-oss-20b-b200x1-latency"
SERVED = [name for name in recipe_files() if not read_recipe(name).recipe.unsupported]
MODEL = "triton/tensorrt_llm/1/model.yaml"
# As NVIDIA's model.py: it completes the configuration, and reads the file that LLM_CONFIG_PATH names.
STAND_IN = """\
import os
import numpy
import triton_python_backend_utils as triton

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_model_transaction_policy({"decoupled": False})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        with open(os.environ["LLM_CONFIG_PATH"]) as file:
            text = numpy.array([file.read()], dtype=object)
        return [triton.InferenceResponse([triton.Tensor("text_output", text)]) for _ in requests]
"""
FIND = """\
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import start
server, environment = start.find_server(Path(sys.argv[2]))
print(json.dumps([list(map(str, server)), environment]))
"""


@pytest.mark.parametrize("name", SERVED)
def test_the_models_arguments_are_config_yaml_and_the_target(name):
    folder = render_folder(read_recipe(name))
    values = yaml.safe_load(folder.files[MODEL])
    triton = values.pop("triton_config")
    assert triton == {"max_batch_size": 0, "decoupled": False}  # both have to be there for model.py
    assert values == folder.rendered.config | {"model": str(folder.rendered.target), "backend": "pytorch"}
    assert judge(read_release(folder.recipe.release), values) == []


def test_no_argument_stands_twice(tmp_path):
    text = recipe_files()[NAME].read_text().replace("options:\n", "options:\n  backend: pytorch\n")
    (tmp_path / f"{NAME}.yaml").write_text(text)
    files = render_folder(read_recipe(str(tmp_path / f"{NAME}.yaml"))).files
    (tmp_path / "model.yaml").write_text(files[MODEL])
    assert read_document(tmp_path / "model.yaml").values["backend"] == "pytorch"


@pytest.fixture
def tritonserver(tmp_path) -> Path:
    """A folder for PATH with the wheel's tritonserver."""
    if not PYTHON.is_file():
        pytest.skip(f"there is no {PYTHON}: make .venv-triton/.ready, or set DFLASH_TRT_TRITON_PYTHON")
    tools, backends = tmp_path / "bin", tmp_path / "backends"
    tools.mkdir()
    backends.mkdir()
    words = [PYTHON, "-c", FIND, ROOT / "deploy" / "triton", backends]
    found = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60)
    server, environment = json.loads(found.stdout)
    own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in own.items())
    (tools / "tritonserver").write_text(f'#!/bin/bash\n{exports}exec {shlex.join(server)} "$@"\n')
    (tools / "tritonserver").chmod(0o755)
    return tools


def test_tritonserver_takes_the_repository_and_is_stopped(tritonserver, tmp_path):
    folder = tmp_path / "recipe"
    fill_folder(render_folder(read_recipe(NAME)).files, folder)
    (folder / MODEL).with_name("model.py").write_text(STAND_IN)
    (folder / MODEL).with_name("helpers.py").touch()
    checkpoints = {variable: tmp_path / f"the {variable}" for variable in ("TARGET", "DRAFT")}
    for path in checkpoints.values():
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").touch()
    search = f"{tritonserver}:{os.environ['PATH']}"
    log = tmp_path / "log"
    with Launched("bash", folder / "triton.sh", PATH=search, GRACE=10, **checkpoints) as launched:
        launched.until_ready()
        url = f"http://127.0.0.1:{launched.port}/v2/models/tensorrt_llm/generate"
        body = json.dumps({"text_input": "one", "sampling_param_max_tokens": 4}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=20) as response:
            log.write_text(json.load(response)["text_output"])
        code, _ = launched.end(signal.SIGTERM)
    read = yaml.safe_load(log.read_text())
    assert code == 0 and read["model"] == str(checkpoints["TARGET"])
    assert read["speculative_config"]["speculative_model"] == str(checkpoints["DRAFT"])


def test_a_path_that_triton_would_take_apart_is_refused(tmp_path):
    folder = tmp_path / "a recipe"
    fill_folder(render_folder(read_recipe(NAME)).files, folder)
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, str(folder / "triton.sh")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "hands paths to a shell as they are" in done.stderr

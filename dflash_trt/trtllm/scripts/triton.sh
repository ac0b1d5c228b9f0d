#!/usr/bin/env bash
# One node, Triton Inference Server with TensorRT-LLM's `llmapi` backend, in NVIDIA's container
# tritonserver:YY.MM-trtllm-python-py3. README.md lists what can be set. PORT is Triton's HTTP port; gRPC and metrics take
# the two behind it.
#
# The backend itself is NVIDIA's and does not come with this: copy it from NVIDIA/TensorRT-LLM, at the tag of the
# TensorRT-LLM in the container:
#
#   cp triton_backend/all_models/llmapi/tensorrt_llm/1/*.py HERE/triton/tensorrt_llm/1/
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$here/settings.sh"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"
trap clean_up EXIT

model=$here/triton/tensorrt_llm/1
refuse_server_command triton.sh
need_models
need_port 3
need_program tritonserver "run this in NVIDIA's tritonserver container with TensorRT-LLM"
for file in model.py helpers.py; do
    if [[ ! -f $model/$file ]]; then
        copy="cp triton_backend/all_models/llmapi/tensorrt_llm/1/$file of NVIDIA/TensorRT-LLM there"
        problems+=("NVIDIA's $file is missing — $model — $copy")
    fi
done
if [[ $here =~ [^A-Za-z0-9_@%+=:,./-] ]]; then
    problems+=("Triton's Python backend hands paths to a shell as they are — $here — move this folder to a plain path")
fi
if ((NODES > 1)); then
    problems+=("$NODES nodes are meant — settings.sh — Triton is for one; submit slurm.sbatch")
fi
refuse_problems

# model.py reads the file that this variable names.
configure "$model/model.yaml" "$DFLASH_TRT_RUN/model.yaml"
export LLM_CONFIG_PATH=$DFLASH_TRT_RUN/model.yaml
export HEALTH=/v2/health/ready

cd -- "$STARTED_IN"
run tritonserver "--model-repository=$here/triton" --http-address "$HOST" --http-port "$PORT" \
    --grpc-address "$HOST" --grpc-port "$((PORT + 1))" --metrics-address "$HOST" --metrics-port "$((PORT + 2))" \
    --exit-timeout-secs "$GRACE"

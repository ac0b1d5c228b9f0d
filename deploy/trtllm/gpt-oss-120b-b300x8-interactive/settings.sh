# shellcheck shell=bash disable=SC2034
# Made by `dflash-trt recipe render gpt-oss-120b-b300x8-interactive`. What has a `:-` may be set in the environment instead.
NAME=gpt-oss-120b-b300x8-interactive
RELEASE=1.4.0rc1 # of TensorRT-LLM
NODES=1
WORLD=8 # ranks, one a GPU

TARGET=${TARGET:-/models/openai/gpt-oss-120b}
DRAFT=${DRAFT:-/models/z-lab/gpt-oss-120b-DFlash}
RENDERED_DRAFT=/models/z-lab/gpt-oss-120b-DFlash # the one in config.yaml
TARGET_DOWNLOAD='hf download openai/gpt-oss-120b --local-dir /models/openai/gpt-oss-120b'
DRAFT_DOWNLOAD='hf download z-lab/gpt-oss-120b-DFlash --local-dir /models/z-lab/gpt-oss-120b-DFlash'

HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}
GRACE=${GRACE:-60}                   # seconds that the server has to end
START_TIMEOUT=${START_TIMEOUT:-3600} # seconds within which it must answer
STOP_SIGNAL=${STOP_SIGNAL:-TERM}      # what it is asked to end with
IMAGE=${IMAGE:-nvidia/tensorrt-llm/release:1.4.0rc1}

# Relative paths count from where it was started.
STARTED_IN=${STARTED_IN:-$PWD}
[[ $TARGET == /* ]] || TARGET=$STARTED_IN/$TARGET
[[ $DRAFT == /* ]] || DRAFT=$STARTED_IN/$DRAFT
export TARGET DRAFT HOST PORT STARTED_IN

# Of the server's processes.
ENVIRONMENT=(TRTLLM_ENABLE_PDL)
export TRTLLM_ENABLE_PDL=${TRTLLM_ENABLE_PDL:-1}

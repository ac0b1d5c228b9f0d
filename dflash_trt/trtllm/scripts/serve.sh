#!/usr/bin/env bash
# One node, without a launcher of ranks: trtllm-serve starts its other ranks itself. README.md lists what can be set.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$here/settings.sh"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"
trap clean_up EXIT

need_models
need_port
[[ -n ${SERVER_COMMAND:-} ]] || need_program trtllm-serve "run this where TensorRT-LLM $RELEASE is installed, or docker.sh"
if ((NODES > 1)); then
    problems+=("$NODES nodes are meant — settings.sh — submit slurm.sbatch")
fi
refuse_problems

run bash "$here/server.sh"

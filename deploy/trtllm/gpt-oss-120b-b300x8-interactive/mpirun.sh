#!/usr/bin/env bash
# One node, under mpirun. README.md lists what can be set.
#
# RANKS=1 (default): one process that starts the others itself. RANKS=8, as many as there are GPUs: all are started by
# mpirun, and trtllm-llmapi-launch makes one of them the server.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$here/settings.sh"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"
trap clean_up EXIT

RANKS=${RANKS:-1}
wrapper=()
need_models
need_port
need_program mpirun "install Open MPI, or run this in TensorRT-LLM's container"
need_number RANKS 1 || RANKS=1
if [[ -z ${SERVER_COMMAND:-} ]]; then
    need_program trtllm-serve "run this where TensorRT-LLM $RELEASE is installed"
    if ((RANKS != 1 && RANKS != WORLD)); then
        problems+=("RANKS is $RANKS — environment — set it to 1 or $WORLD")
    elif ((RANKS > 1)); then
        wrapper=(trtllm-llmapi-launch)
    fi
fi
if ((NODES > 1)); then
    problems+=("$NODES nodes are meant — settings.sh — submit slurm.sbatch")
fi
refuse_problems

# Without --bind-to none a single rank, and all that it starts, would be held to one core.
launch=(mpirun --oversubscribe --bind-to none -n "$RANKS")
if ((EUID == 0)); then
    launch+=(--allow-run-as-root)
fi
ask_to_stop() { ask_server_to_stop; }

# trtllm-llmapi-launch takes its command apart at spaces, so what it is given has none.
cd -- "$here"
run "${launch[@]}" "${wrapper[@]}" bash ./server.sh

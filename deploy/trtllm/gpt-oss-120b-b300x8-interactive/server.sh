#!/usr/bin/env bash
# One server process: what the launchers beside this start, on every rank that they start. Not to be run by hand.
#
# SERVER_COMMAND stands for `trtllm-serve MODEL --config FILE`; host and port are added to it.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$here/settings.sh"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"

mkdir -p -- "$DFLASH_TRT_RUN" # on another node it is not there
if [[ -n ${SERVER_COMMAND:-} ]]; then
    mapfile -d '' -t server < <(server_words)
else
    config=$here/config.yaml
    if [[ $DRAFT != "$RENDERED_DRAFT" ]]; then
        config=$DFLASH_TRT_RUN/config.yaml
        configure "$here/config.yaml" "$config"
    fi
    server=(trtllm-serve "$TARGET" --config "$config")
fi
rank=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}}
if [[ $rank == 0 ]]; then
    echo "$$" >"$DFLASH_TRT_RUN/server.pid"
fi
cd -- "$STARTED_IN"
exec "${server[@]}" --host "$HOST" --port "$PORT"

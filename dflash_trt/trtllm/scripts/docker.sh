#!/usr/bin/env bash
# One node, in TensorRT-LLM's container. README.md lists what can be set; IMAGE is the image's full name, with the registry
# that it was pulled from, DOCKER another program than docker, DOCKER_GPUS what `--gpus` is given.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$here/settings.sh"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"
trap clean_up EXIT

docker=${DOCKER:-docker}
refuse_server_command docker.sh
need_models
need_port
need_program "$docker" "install a container runtime and NVIDIA's container toolkit"
if [[ -z $IMAGE ]]; then
    problems+=("no image — IMAGE — set it to one of TensorRT-LLM $RELEASE")
elif command -v -- "$docker" >/dev/null && ! "$docker" image inspect "$IMAGE" >/dev/null 2>&1; then
    problems+=("no such image here — $IMAGE — pull it from NVIDIA's registry or a mirror, and set IMAGE to its full name")
fi
if ((NODES > 1)); then
    problems+=("$NODES nodes are meant — settings.sh — submit slurm.sbatch")
fi
need_whole "$TARGET"
need_whole "$DRAFT"
refuse_problems

field() { printf '"%s"' "${1//\"/\"\"}"; } # of CSV, which --mount is

container=$NAME-$$
host=$HOST
case $HOST in
    localhost) host=127.0.0.1 ;;
    *:*) host=[$HOST] ;;
esac
# Ranks of a node exchange through shared memory, hence the host's; its limits are those of NVIDIA's guide.
launch=("$docker" run --rm --init --name "$container" --gpus "${DOCKER_GPUS:-all}" --ipc=host
    --ulimit memlock=-1 --ulimit stack=67108864 --publish "$host:$PORT:$PORT")
for folder in "$here" "$TARGET" "$DRAFT"; do
    launch+=(--mount "type=bind,$(field "source=$folder"),$(field "target=$folder"),readonly")
done
for variable in "${ENVIRONMENT[@]}" TARGET DRAFT PORT; do
    launch+=(--env "$variable")
done
launch+=(--env HOST=0.0.0.0 --env "STARTED_IN=$here" --env DFLASH_TRT_RUN=/tmp/dflash-trt)

ask_to_stop() { "$docker" stop --time "$GRACE" "$container" >/dev/null & }
# Without its client a container goes on.
end_at_once() {
    "$docker" rm --force "$container" >/dev/null 2>&1 || true
    kill -KILL -- "-$child" 2>/dev/null || true
}
run "${launch[@]}" "$IMAGE" bash "$here/server.sh"

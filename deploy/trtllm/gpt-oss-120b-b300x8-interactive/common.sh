# shellcheck shell=bash
# What the launchers share: checks, the wait for the first answer, a clean stop. They source settings.sh, then this.

# Files of this run alone. `dflash-trt recipe launch` makes the folder itself, and leaves it to this to remove it.
export DFLASH_TRT_RUN=${DFLASH_TRT_RUN:-$(mktemp -d -t dflash-trt-run.XXXXXX)}
clean_up() {
    if [[ ${DFLASH_TRT_RUN##*/} == dflash-trt-run.* ]]; then
        rm -rf -- "$DFLASH_TRT_RUN"
    fi
}

say() { printf '%s: %s\n' "$NAME" "$*" >&2; }

# -- checks: all are made before any is told

problems=()

need_program() { # PROGRAM WHERE-IT-COMES-FROM
    command -v -- "$1" >/dev/null || problems+=("no program $1 here — PATH — $2")
}

need_checkpoint() { # VARIABLE HOW-TO-DOWNLOAD
    local folder=${!1} file
    if [[ ! -d $folder ]]; then
        problems+=("no such folder — $folder — set $1, or: $2")
        return
    fi
    if [[ ! -f $folder/config.json ]]; then
        problems+=("no config.json in it — $folder — set $1 to a checkpoint, or: $2")
    fi
    for file in "$folder"/*.safetensors; do
        [[ -e $file ]] && return
    done
    problems+=("no *.safetensors in it — $folder — set $1 to a checkpoint, or: $2")
}

# What trtllm-serve needs; a SERVER_COMMAND brings its own.
need_models() {
    if [[ -z ${SERVER_COMMAND:-} ]]; then
        need_checkpoint TARGET "$TARGET_DOWNLOAD"
        need_checkpoint DRAFT "$DRAFT_DOWNLOAD"
    fi
}

need_port() {
    if [[ ! $PORT =~ ^[0-9]+$ ]] || ((PORT < 1 || PORT > 65535)); then
        problems+=("PORT is '$PORT' — settings — give a number from 1 to 65535")
    elif (connected) 2>/dev/null; then
        problems+=("something listens there already — $(address):$PORT — stop it, or set PORT")
    fi
}

refuse_problems() {
    if ((${#problems[@]})); then
        printf 'error: %s\n' "${problems[@]}" >&2
        exit 2
    fi
    if [[ $HOST != 127.0.0.1 && $HOST != localhost && $HOST != ::1 ]]; then
        say "others reach $HOST: this server asks nobody for a key, so put a proxy that does before it"
    fi
}

# -- the server's settings with other folders than they were rendered for

# Writes FROM to TO with TARGET and DRAFT in their places.
configure() { # FROM TO
    local line
    while IFS= read -r line || [[ -n $line ]]; do
        case $line in
            'model: '*) printf 'model: %s\n' "$(quoted "$TARGET")" ;;
            '  speculative_model: '*) printf '  speculative_model: %s\n' "$(quoted "$DRAFT")" ;;
            *) printf '%s\n' "$line" ;;
        esac
    done <"$1" >"$2"
}

quoted() { # as YAML's double quotes take it
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

# -- running

# Where to ask a server that listens on HOST.
address() {
    case $HOST in
        0.0.0.0) echo 127.0.0.1 ;;
        ::) echo ::1 ;;
        *) echo "$HOST" ;;
    esac
}

connected() { exec 3<>"/dev/tcp/$(address)/$PORT"; }

# In a subshell, for the sake of its descriptor. HEALTH is the path to ask for.
healthy() (
    connected || return 1
    printf 'GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "${HEALTH:-/health}" >&3
    IFS= read -r -t 5 line <&3 && [[ $line == HTTP/*' 200 '* ]]
) 2>/dev/null

child=

# How to ask the server to end; a launcher may know better.
ask_to_stop() { kill -"$STOP_SIGNAL" "$child" 2>/dev/null || true; }

# The process that server.sh became, where that runs on this machine: launchers of ranks end ranks at once, and what the
# server still had to say would be lost.
ask_server_to_stop() {
    signal_server -"$STOP_SIGNAL" || kill -TERM "$child" 2>/dev/null || true
}

signal_server() { # SIGNAL
    local server
    server=$(cat -- "$DFLASH_TRT_RUN/server.pid" 2>/dev/null) && kill "$1" "$server" 2>/dev/null
}

stopping=0
stop() {
    stopping=$((stopping + 1))
    deadline=$((SECONDS + GRACE))
    if ((stopping == 1)); then
        say "asking the server to end; it has $GRACE s"
        if [[ -n $child ]]; then
            ask_to_stop
        fi
    else
        deadline=$SECONDS # asked twice
    fi
}

# After the grace: first its launcher is asked, then all that it started is ended.
insist() {
    killed=$((killed + 1))
    deadline=$((SECONDS + 5))
    if ((killed == 1)); then
        say "it has not ended: asking its launcher"
        kill -TERM -- "-$child" 2>/dev/null || true
    elif ((killed == 2)); then
        say "it has not ended: killing it"
        signal_server -KILL || true
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
}

# Runs a command, says when its server answers, hands SIGTERM and Ctrl-C on, and returns what the command returned.
run() {
    local status=0 ready=0 given_up=0 start=$SECONDS
    killed=0
    trap stop TERM INT
    set -m # a process group of its own: Ctrl-C reaches this script alone, and the group can be ended as one
    "$@" </dev/null &
    child=$!
    set +m
    trap 'kill -KILL -- "-$child" 2>/dev/null || true; clean_up' EXIT # nothing of it stays
    if ((stopping)); then
        ask_to_stop
    fi
    while kill -0 "$child" 2>/dev/null; do
        if ((stopping && SECONDS >= deadline)); then
            insist
        elif ((!ready && !stopping)); then
            if healthy; then
                ready=1
                say "ready after $((SECONDS - start)) s: http://$(address):$PORT"
            elif ((SECONDS - start > START_TIMEOUT)); then
                say "no answer within $START_TIMEOUT s (START_TIMEOUT)"
                given_up=1
                stop
            fi
        fi
        if ((ready && !stopping)); then
            wait "$child" || true # a signal interrupts it
        else
            sleep 0.2
        fi
    done
    wait "$child" || status=$?
    if ((!ready && !stopping)); then
        say "it ended with $status before it answered"
    fi
    if ((!status && !ready && (given_up || !stopping))); then
        status=1
    fi
    return "$status"
}

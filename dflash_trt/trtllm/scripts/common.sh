# shellcheck shell=bash
# What the launchers share: checks, the wait for the first answer, a clean stop. They source settings.sh, then this.

# Files of this run alone. `dflash-trt recipe launch` makes the folder itself, and leaves it to this to remove it.
clean_up() {
    if [[ ${DFLASH_TRT_RUN##*/} == dflash-trt-run.* ]]; then
        rm -rf -- "$DFLASH_TRT_RUN"
    fi
}
# Until the server is started. Without these bash would forget a Ctrl-C that comes while it waits for a program.
trap 'clean_up; exit 129' HUP
trap 'clean_up; exit 130' INT
trap 'clean_up; exit 131' QUIT
trap 'clean_up; exit 143' TERM
DFLASH_TRT_RUN=${DFLASH_TRT_RUN:-}
if [[ -z $DFLASH_TRT_RUN ]] && ! DFLASH_TRT_RUN=$(mktemp -d -t dflash-trt-run.XXXXXX 2>/dev/null); then
    echo "error: no folder can be made for this run — ${TMPDIR:-/tmp} — set TMPDIR to a place that can be written to" >&2
    exit 2
fi
export DFLASH_TRT_RUN

# A terminal may be closed, or a `| tee` ended by the same Ctrl-C; the server is stopped all the same.
say() { printf '%s: %s\n' "$NAME" "$*" >&2 || true; }

# -- checks: all are made before any is told

problems=()

need_program() { # PROGRAM WHERE-IT-COMES-FROM
    command -v -- "$1" >/dev/null || problems+=("no program $1 here — PATH — $2")
}

need_number() { # VARIABLE LEAST
    if [[ ! ${!1} =~ ^(0|[1-9][0-9]{0,7})$ ]] || ((${!1} < $2)); then
        problems+=("$1 is '${!1}' — environment — give a whole number, $2 or more")
        return 1
    fi
}

# What can be set in the environment, and the command that stands in for trtllm-serve.
need_settings() {
    local words
    need_number GRACE 0 || true
    need_number START_TIMEOUT 1 || true
    if [[ $STOP_SIGNAL == 0 ]] || ! kill -l "$STOP_SIGNAL" >/dev/null 2>&1; then
        problems+=("STOP_SIGNAL is '$STOP_SIGNAL' — environment — name a signal: TERM, INT, USR1")
    fi
    if [[ -z ${SERVER_COMMAND:-} ]]; then
        return
    fi
    if ! server_words >/dev/null 2>&1; then
        problems+=("a quote in it is not closed on its line — SERVER_COMMAND — write it as a shell would take it, on one line")
        return
    fi
    mapfile -d '' -t words < <(server_words)
    need_program "${words[0]}" "SERVER_COMMAND starts with it"
}

# The words of SERVER_COMMAND, as a shell would quote them.
server_words() { xargs printf '%s\0' <<<"$SERVER_COMMAND"; }

refuse_server_command() { # WHO-DOES-NOT-TAKE-IT
    if [[ -n ${SERVER_COMMAND:-} ]]; then
        problems+=("$1 takes no other server — SERVER_COMMAND — unset it, or use serve.sh, mpirun.sh or slurm.sbatch")
        unset SERVER_COMMAND
    fi
}

need_checkpoint() { # VARIABLE HOW-TO-DOWNLOAD
    local folder=${!1} file
    if [[ $folder == *[[:cntrl:]]* ]]; then
        problems+=("a character in its name is none that YAML would keep — ${folder@Q} — rename it, and set $1")
        return
    fi
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

# A container is given the folder alone, and not what links in it lead to, as they do in the cache of Hugging Face.
need_whole() { # FOLDER
    local file folder
    folder=$(realpath -- "$1" 2>/dev/null) || return 0
    for file in "$folder"/*; do
        if [[ -L $file && $(realpath -- "$file") != "$folder"/* ]]; then
            problems+=("links in it lead out of it, where a container sees nothing — $1 — copy it: cp -rL, or hf download --local-dir")
            return
        fi
    done
}

need_port() { # HOW-MANY
    local one many=${1:-1}
    if [[ ! $PORT =~ ^[1-9][0-9]{0,4}$ ]] || ((PORT + many - 1 > 65535)); then
        problems+=("PORT is '$PORT' — settings — give a number from 1 to $((65536 - many))")
        return
    fi
    for ((one = PORT; one < PORT + many; one++)); do
        if (connected "$one") 2>/dev/null; then
            problems+=("something listens there already — $(address):$one — stop it, or set PORT")
        fi
    done
}

refuse_problems() {
    need_settings
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

url() { if [[ $HOST == *:* ]]; then echo "http://[$(address)]:$PORT"; else echo "http://$(address):$PORT"; fi; }

connected() { exec 3<>"/dev/tcp/$(address)/$1"; } # PORT

# In a subshell, for the sake of its descriptor. HEALTH is the path to ask for.
healthy() (
    connected "$PORT" || return 1
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

# Ends all that was started, whatever it is doing.
end_at_once() {
    signal_server -KILL || true
    kill -KILL -- "-$child" 2>/dev/null || true
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
        end_at_once
    fi
}

# Runs a command, says when its server answers, hands SIGTERM, Ctrl-C and the end of the terminal on, and returns what the
# command returned.
run() {
    local status=0 ready=0 given_up=0 start=$SECONDS
    killed=0
    trap stop TERM INT HUP QUIT
    trap : PIPE # not ignored: the server would inherit that
    set -m # a process group of its own: Ctrl-C reaches this script alone, and the group can be ended as one
    "$@" </dev/null &
    child=$!
    set +m
    trap 'end_at_once; clean_up' EXIT # nothing of it stays
    if ((stopping)); then
        ask_to_stop
    fi
    while kill -0 "$child" 2>/dev/null; do
        if ((stopping && SECONDS >= deadline)); then
            insist
        elif ((!ready && !stopping)); then
            if healthy; then
                ready=1
                say "ready after $((SECONDS - start)) s: $(url)"
            elif ((SECONDS - start > START_TIMEOUT)); then
                say "no answer within $START_TIMEOUT s (START_TIMEOUT)"
                given_up=1
                stop
            fi
        fi
        if ((ready && !stopping)); then
            wait "$child" || true # a signal interrupts it
        else
            sleep 0.2 || true # Ctrl-C in a terminal ends it, too
        fi
    done
    wait "$child" || status=$?
    rm -f -- "$DFLASH_TRT_RUN/server.pid" # its number may be another's soon
    if ((!ready && !stopping)); then
        say "it ended with $status before it answered"
    fi
    if ((!status && !ready && (given_up || !stopping))); then
        status=1
    fi
    return "$status"
}

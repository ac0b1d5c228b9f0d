"""`check --doctor`: what this machine lacks for a deployment, and how to get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dflash_trt.sizes import format_bytes
from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.deployment import ERROR, NOTE, WARNING, Deployment, Finding
from dflash_trt.trtllm.machine import Machine, look_around
from dflash_trt.trtllm.rules.setup import ENVIRONMENT
from dflash_trt.trtllm.rules.table import Fault, Row
from dflash_trt.trtllm.settings import TRTLLM, VANILLA

GIB = 1 << 30
BLACKWELL, DRIVER = 100, 575  # the first driver that the guide for gpt-oss on Blackwell allows
BUSY = GIB  # bytes that a display or a monitor may hold
SHARED, ENOUGH_SHARED = GIB, 16 * GIB
STACK, FILES = 64 << 20, 65536
GUIDE = "deployment-guide-for-gpt-oss-on-trtllm.md of TensorRT-LLM"
JUDGEMENT = "our judgement"
DOCKER = "docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864"
READY, NO_FABRIC = ("Completed", "Success"), ("N/A", "Not Supported")

Check = Callable[[Machine, Deployment], Iterator[Fault]]


@dataclass(frozen=True)
class MachineRule(Row):
    check: Check


MACHINE_RULES: dict[str, MachineRule] = {}


def machine_rule(id: str, severity: str, title: str, *, why: str, source: str) -> Callable[[Check], Check]:
    def enter(check: Check) -> Check:
        MACHINE_RULES[id] = MachineRule(id, severity, title, why, source, check)
        return check

    return enter


def look(deployment: Deployment, port: int, environment: Mapping[str, str]) -> Machine:
    """This machine, with the environment that the deployment's server would have on it."""
    return look_around({**environment, **deployment.environment}, port)


def doctor(machine: Machine, deployment: Deployment) -> list[Finding]:
    """Without a GPU, that alone is said: the rest would be about a machine that serves nothing."""
    rules = MACHINE_RULES.values() if machine.gpus else [MACHINE_RULES["DM001"]]
    return [rule.finding(fault) for rule in rules for fault in rule.check(machine, deployment)]


@machine_rule(
    "DM001",
    ERROR,
    "an NVIDIA GPU is here",
    why="TensorRT-LLM runs on nothing else",
    source="nvidia-smi",
)
def gpu_is_there(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if not machine.gpus:
        what = f"no NVIDIA GPU here ({machine.trouble}): nothing else of this machine was checked"
        yield Fault(what, f"run --doctor on the machine with the {deployment.gpus}")


@machine_rule(
    "DM002",
    ERROR,
    "as many GPUs as the deployment has, of its kind",
    why="a rank without a GPU fails at start; another card has other kernels and another memory",
    source="nvidia-smi",
)
def gpus_are_those(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    asked, found = deployment.gpus, machine.gpus
    needed = min(asked.count, deployment.settings.world)
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    count = len(found) if visible is None else min(len(found), len([one for one in visible.split(",") if one.strip()]))
    if count < needed:
        hidden = f", CUDA_VISIBLE_DEVICES {visible!r} shows {count}" if count < len(found) else ""
        yield Fault(f"{needed} GPUs are needed; {len(found)} are here{hidden}", "use a node with more, or fewer ranks")
    others = {gpu.name: gpu.sm for gpu in found if gpu.sm not in (0, asked.card.sm)}
    for name, sm in others.items():
        what = f"{name} is SM{sm}, not the {asked.card.name} (SM{asked.card.sm}) that was checked"
        yield Fault(what, "check again with --gpus as they are")
    smallest = min(gpu.memory for gpu in found)
    if not others and smallest and smallest < asked.card.memory * 0.97:
        what = f"the smallest GPU has {format_bytes(smallest)}, {asked.card.name} has {format_bytes(asked.card.memory)}"
        yield Fault(what, "check again with --gpus as they are", severity=WARNING)


@machine_rule(
    "DM003",
    ERROR,
    f"driver {DRIVER} or later, on Blackwell",
    why="TensorRT-LLM is built with a CUDA that needs it there",
    source=GUIDE,
)
def driver_is_new(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    for driver in sorted({gpu.driver for gpu in machine.gpus if gpu.sm >= BLACKWELL}):
        major = driver.partition(".")[0]
        if major.isdecimal() and int(major) < DRIVER:
            what = f"driver {driver} is older than {DRIVER}"
            yield Fault(what, "install the data-center driver 580 (and its fabric manager) on the host, then reboot")


@machine_rule(
    "DM004",
    ERROR,
    "no MIG",
    why="a slice of a GPU has a part of its memory, and no NVLink",
    source="NVIDIA MIG User Guide",
)
def gpus_are_whole(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if sliced := [gpu.index for gpu in machine.gpus if gpu.mig]:
        which = ", ".join(map(str, sliced))
        alone = deployment.settings.world == 1
        yield Fault(f"MIG is enabled on GPU {which}", f"sudo nvidia-smi -i {which.replace(' ', '')} -mig 0",
                    severity=WARNING if alone else None)  # fmt: skip


@machine_rule(
    "DM005",
    WARNING,
    "nothing else uses the GPUs",
    why="free_gpu_memory_fraction counts what is free at start; what others take later is missing then",
    source=f"kvcache.md of TensorRT-LLM; {JUDGEMENT}: 1 GiB may be in use",
)
def gpus_are_free(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if busy := [gpu for gpu in machine.gpus if gpu.used > BUSY]:
        held = ", ".join(f"GPU {gpu.index}: {format_bytes(gpu.used)}" for gpu in busy)
        yield Fault(f"memory is in use ({held})", "nvidia-smi names the processes; stop them first")


@machine_rule(
    "DM006",
    ERROR,
    "NVLink is up between all GPUs",
    why="without it every layer's sum goes over PCIe: tensor parallelism is many times slower",
    source="nvidia-smi nvlink -s, nvidia-smi topo -m",
)
def links_are_up(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if min(deployment.settings.world, len(machine.gpus)) < 2 or not deployment.gpus.card.nvlink:
        return
    fix = "restart the fabric manager (systemctl restart nvidia-fabricmanager), then see nvidia-smi nvlink -e"
    down = {gpu: links for gpu, links in machine.links.items() if links[0] < links[1]}
    if down:
        listed = ", ".join(f"GPU {gpu}: {up} of {links}" for gpu, (up, links) in down.items())
        yield Fault(f"NVLinks are down ({listed} up)", fix)
    elif machine.links and not any(links for _, links in machine.links.values()):
        yield Fault("the GPUs report no NVLink", fix)
    apart = sorted(pair for pair, word in machine.paths.items() if pair[0] < pair[1] and not word.startswith("NV"))
    if apart and not down:
        one, two = apart[0]
        what = f"{len(apart)} pairs of GPUs are not joined by NVLink (GPU {one} and {two}: {machine.paths[one, two]})"
        yield Fault(what, fix)


@machine_rule(
    "DM007",
    ERROR,
    "the NVSwitch fabric is initialized",
    why="until the fabric manager has set the switches up, CUDA fails with error 802, system not yet initialized",
    source="Fabric Manager User Guide; CUDA runtime API (cudaErrorSystemNotReady, 802); nvidia-smi -q, section Fabric",
)
def fabric_is_ready(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    bad = {gpu: words for gpu, words in machine.fabric.items() if words != READY and words[0] not in NO_FABRIC}
    if bad:
        gpu, (state, status) = next(iter(bad.items()))
        fix = "install nvidia-fabricmanager of the driver's version on the host, and start it"
        yield Fault(f"the fabric of {len(bad)} GPUs is not ready (GPU {gpu}: {state}, {status})", fix)


@machine_rule(
    "DM008",
    ERROR,
    "shared memory for NCCL and MPI",
    why="ranks of a node talk through /dev/shm; Docker gives it 64 MiB unless told otherwise",
    source=f"{GUIDE} (--ipc=host); {JUDGEMENT}: 1 GiB at least, 16 GiB to be at ease",
)
def shared_memory_is_there(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    size = machine.shared_memory
    if size is None or deployment.settings.world == 1 or size >= ENOUGH_SHARED:
        return
    fix = f"{DOCKER} … or --shm-size=64g; on the host: mount -o remount,size=64g /dev/shm"
    yield Fault(f"/dev/shm has {format_bytes(size)}", fix, severity=None if size < SHARED else WARNING)


@machine_rule(
    "DM009",
    WARNING,
    "limits of memory to lock, stack and open files",
    why="NCCL locks pages for the network, compiled graphs take deep stacks, every request is a file",
    source=f"NVIDIA's containers (memlock=-1, stack=67108864); {JUDGEMENT}: {FILES:,} files",
)
def limits_are_wide(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    locked, stack, files = (machine.limits.get(name, 0) for name in ("memlock", "stack", "nofile"))
    if not machine.limits:
        return
    if locked is not None:
        yield Fault(f"ulimit -l is {locked >> 10} KiB", "ulimit -l unlimited; docker: --ulimit memlock=-1")
    if stack is not None and stack < STACK:
        yield Fault(f"ulimit -s is {stack >> 10} KiB", f"ulimit -s {STACK >> 10}; docker: --ulimit stack={STACK}")
    if files is not None and files < FILES:
        yield Fault(f"ulimit -n is {files}", f"ulimit -n {FILES}; docker: --ulimit nofile={FILES}")


@machine_rule(
    "DM010",
    ERROR,
    "MPI starts the ranks",
    why="several ranks are started with mpirun, or with srun under Slurm",
    source="trtllm-llmapi-launch of TensorRT-LLM; the scripts of `dflash-trt recipe launch`",
)
def mpi_is_there(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if deployment.settings.world > 1 and machine.mpi is None and not machine.slurm:
        yield Fault("neither mpirun nor srun is here", "use TensorRT-LLM's container, or: apt install openmpi-bin")
    elif deployment.gpus.nodes > 1 and not machine.slurm:
        what = f"{deployment.gpus.nodes} nodes without Slurm's srun"
        yield Fault(what, "start mpirun with a host file, the same paths on every node", severity=NOTE)


@machine_rule(
    "DM011",
    WARNING,
    "TensorRT-LLM of the deployment's release is installed",
    why="another release has other keys, and other faults",
    source="Python's list of packages",
)
def release_is_installed(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    version, wanted = machine.packages.get("tensorrt_llm"), deployment.release
    image = f"nvcr.io/nvidia/tensorrt-llm/release:{wanted}"
    if version is None:
        inside = f"this container ({machine.container})" if machine.container else "this machine"
        yield Fault(f"tensorrt_llm is not installed in {inside}", f"serve in {image}", severity=NOTE)
    elif version != wanted:
        yield Fault(
            f"tensorrt_llm {version} is installed, {wanted} was checked", f"use {image}, or --release {version}"
        )


@machine_rule(
    "DM012",
    ERROR,
    "the package that the drafter's attention needs",
    why="VANILLA calls flash-attn, TRTLLM calls FlashInfer: RuntimeError at the first forward",
    source="_torch/speculative/dflash.py and dflash_attention.py of TensorRT-LLM",
)
def attention_is_installed(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    backend = footprint.backend(deployment.settings)
    package = {VANILLA: "flash-attn", TRTLLM: "flashinfer-python"}.get(backend)
    if package and "tensorrt_llm" in machine.packages and package not in machine.packages:
        yield Fault(f"{package} is not installed, which attention_backend {backend} needs", f"pip install {package}")


@machine_rule(
    "DM013",
    ERROR,
    "room on the disk for the checkpoints",
    why="the download stops half way, after an hour",
    source="sizes of the checkpoints",
)
def disk_has_room(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if machine.free is None or deployment.target.path is not None:
        return
    size = footprint.weights(deployment.target, deployment.settings)
    if size is not None and (total := size * deployment.settings.tp * deployment.settings.pp) > machine.free:
        what = f"the target takes about {format_bytes(total)}; {machine.cache} has {format_bytes(machine.free)} free"
        yield Fault(what, "set HF_HOME to a larger disk, or pass --target DIR of a copy")


@machine_rule(
    "DM014",
    ERROR,
    "the port is free",
    why="the server finds out after it has loaded the weights",
    source="trtllm-serve, command-line reference",
)
def port_is_free(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    if not machine.port_is_free:
        fix = "stop what listens there (ss -ltnp), or choose another --port"
        yield Fault(f"port {machine.port} is in use", fix)


@machine_rule(
    "DM015",
    WARNING,
    "no variable of this shell falsifies or slows answers",
    why="the server inherits it",
    source="DF008, for this shell",
)
def shell_is_harmless(machine: Machine, deployment: Deployment) -> Iterator[Fault]:
    for name, (harmless, severity, effect) in ENVIRONMENT.items():
        value = machine.environment.get(name, "")
        if value not in harmless and name not in deployment.environment:
            yield Fault(f"{name}={value} {effect}", f"unset {name}", severity=severity)

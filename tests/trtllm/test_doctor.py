"""The doctor reads what nvidia-smi and the system say, and names what is missing.

`recorded/` holds answers of nvidia-smi, written by hand in its format: no machine here has such cards.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.trtllm.deployment import ERROR, NOTE, WARNING
from dflash_trt.trtllm.doctor import MACHINE_RULES, doctor
from dflash_trt.trtllm.machine import Machine, look_around, parse_fabric, parse_gpus, parse_links, parse_paths
from tests.trtllm.rules.build import deployment

RECORDED = Path(__file__).parent / "recorded"
GIB = 1 << 30
VANILLA = {"speculative_config.attention_backend": "VANILLA"}
PAIR = {"gpus": "RTX PRO 6000 x2", "config": {"tensor_parallel_size": 2, **VANILLA}}


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def healthy(**changes: Any) -> Machine:
    """A DGX B300 in TensorRT-LLM's container."""
    machine = Machine(
        gpus=parse_gpus(recorded("b300x8.gpus")),
        links=parse_links(recorded("b300x8.links")),
        paths=parse_paths(recorded("b300x8.topo")),
        fabric=parse_fabric(recorded("b300x8.query")),
        shared_memory=1000 * GIB,
        limits={"memlock": None, "stack": None, "nofile": 1 << 20},
        mpi="mpirun (Open MPI) 4.1.7",
        packages={"tensorrt_llm": "1.4.0rc1", "flashinfer-python": "0.6.4", "flash-attn": "2.8.3"},
        container="/.dockerenv",
        free=1000 * GIB,
        cache=Path("/root/.cache/huggingface/hub"),
        environment={},
    )
    return dataclasses.replace(machine, **changes)


def test_the_eight_gpus_of_a_b300_are_read():
    gpus = parse_gpus(recorded("b300x8.gpus"))
    assert len(gpus) == 8
    assert {(gpu.name, gpu.sm, gpu.driver, gpu.mig, gpu.memory) for gpu in gpus} == {
        ("NVIDIA B300 SXM6 AC", 103, "580.95.05", False, 275040 << 20)
    }


def test_a_card_with_mig_is_read():
    assert [gpu.mig for gpu in parse_gpus(recorded("b300-mig.gpus"))] == [True]


def test_a_card_that_knows_no_mig_is_read():
    assert [(gpu.mig, gpu.sm) for gpu in parse_gpus(recorded("rtx-pro-6000x2.gpus"))] == [(False, 120)] * 2


@pytest.mark.parametrize("text", ["", "No devices were found", "NVIDIA-SMI has failed because it couldn't", "a, b, c"])
def test_what_is_no_list_of_gpus_has_none(text):
    assert parse_gpus(text) == ()


def test_links_are_counted_by_gpu():
    assert parse_links(recorded("b300x8.links")) == dict.fromkeys(range(8), (18, 18))
    down = parse_links(recorded("b300x8-link-down.links"))
    assert (down[3], down[5], down[0]) == ((0, 18), (16, 18), (18, 18))
    assert parse_links(recorded("rtx-pro-6000x2.links")) == {0: (0, 0), 1: (0, 0)}


def test_the_matrix_of_paths_is_read_without_its_network_cards_and_legend():
    paths = parse_paths(recorded("b300x8.topo"))
    assert len(paths) == 8 * 7 and {*paths.values()} == {"NV18"}
    assert parse_paths(recorded("rtx-pro-6000x2.topo")) == {(0, 1): "NODE", (1, 0): "NODE"}


def test_the_fabric_is_read_from_its_own_section():
    assert parse_fabric(recorded("b300x8.query")) == dict.fromkeys(range(8), ("Completed", "Success"))
    assert parse_fabric(recorded("b300x8-no-manager.query"))[7] == ("In Progress", "N/A")


def test_a_healthy_machine_lacks_nothing():
    assert doctor(healthy(), deployment()) == []


def test_two_cards_on_pcie_are_healthy_too():
    machine = healthy(
        gpus=parse_gpus(recorded("rtx-pro-6000x2.gpus").replace("2048", "15")),
        links=parse_links(recorded("rtx-pro-6000x2.links")),
        paths=parse_paths(recorded("rtx-pro-6000x2.topo")),
        fabric=parse_fabric(recorded("rtx-pro-6000x2.query")),
    )
    assert doctor(machine, deployment(**PAIR)) == []


def test_without_a_gpu_that_is_all_that_is_said():
    [only] = doctor(Machine(trouble="nvidia-smi is not installed"), deployment())
    assert (only.rule, only.severity) == ("DM001", ERROR)
    assert only.what == "no NVIDIA GPU here (nvidia-smi is not installed): nothing else of this machine was checked"


CASES: dict[str, list[tuple[Machine, dict[str, Any], str, str]]] = {
    "DM001": [(Machine(trouble="No devices were found"), {}, ERROR, "No devices were found")],
    "DM002": [
        (healthy(gpus=healthy().gpus[:4]), {}, ERROR, "8 GPUs are needed; 4 are here"),
        (healthy(environment={"CUDA_VISIBLE_DEVICES": "0,1"}), {}, ERROR, "CUDA_VISIBLE_DEVICES '0,1' shows 2"),
        (healthy(gpus=parse_gpus(recorded("b200x8-old-driver.gpus"))), {}, ERROR, "NVIDIA B200 is SM100, not the B300"),
        (healthy(gpus=tuple(dataclasses.replace(gpu, memory=200 * GIB) for gpu in healthy().gpus)), {}, WARNING,
         "the smallest GPU has 200 GiB"),
    ],
    "DM003": [(healthy(gpus=parse_gpus(recorded("b200x8-old-driver.gpus"))), {"gpus": "B200x8"}, ERROR, "570.133.20")],
    "DM004": [
        (healthy(gpus=tuple(dataclasses.replace(gpu, mig=gpu.index == 2) for gpu in healthy().gpus)), {}, ERROR,
         "MIG is enabled on GPU 2"),
        (healthy(gpus=parse_gpus(recorded("b300-mig.gpus"))),
         {"gpus": "B300", "config": {"tensor_parallel_size": 1}}, WARNING, "MIG is enabled on GPU 0"),
    ],
    "DM005": [
        (healthy(gpus=tuple(dataclasses.replace(gpu, used=9 * GIB) for gpu in healthy().gpus[:1]) + healthy().gpus[1:]),
         {}, WARNING, "GPU 0: 9 GiB"),
    ],
    "DM006": [
        (healthy(links=parse_links(recorded("b300x8-link-down.links"))), {}, ERROR, "GPU 3: 0 of 18, GPU 5: 16 of 18"),
        (healthy(links=dict.fromkeys(range(8), (0, 0))), {}, ERROR, "report no NVLink"),
        (healthy(paths=healthy().paths | {(0, 1): "SYS", (1, 0): "SYS"}), {}, ERROR, "GPU 0 and 1: SYS"),
    ],
    "DM007": [(healthy(fabric=parse_fabric(recorded("b300x8-no-manager.query"))), {}, ERROR, "In Progress")],
    "DM008": [
        (healthy(shared_memory=64 << 20), {}, ERROR, "/dev/shm has 64 MiB"),
        (healthy(shared_memory=8 * GIB), {}, WARNING, "/dev/shm has 8 GiB"),
    ],
    "DM009": [
        (healthy(limits={"memlock": 8 << 20, "stack": None, "nofile": None}), {}, WARNING, "ulimit -l is 8192 KiB"),
        (healthy(limits={"memlock": None, "stack": 8 << 20, "nofile": None}), {}, WARNING, "ulimit -s is 8192 KiB"),
        (healthy(limits={"memlock": None, "stack": None, "nofile": 1024}), {}, WARNING, "ulimit -n is 1024"),
    ],
    "DM010": [
        (healthy(mpi=None), {}, ERROR, "neither mpirun nor srun"),
        (healthy(), {"nodes": 2}, NOTE, "2 nodes without Slurm"),
    ],
    "DM011": [
        (healthy(packages={}), {}, NOTE, "tensorrt_llm is not installed in this container"),
        (healthy(packages={**healthy().packages, "tensorrt_llm": "1.3.0rc20"}), {}, WARNING, "1.3.0rc20 is installed"),
    ],
    "DM012": [
        (healthy(packages={"tensorrt_llm": "1.4.0rc1"}), {}, ERROR, "flashinfer-python"),
        (healthy(packages={"tensorrt_llm": "1.4.0rc1"}), {"config": VANILLA}, ERROR, "flash-attn"),
    ],
    "DM013": [(healthy(free=20 * GIB), {}, ERROR, "/root/.cache/huggingface/hub has 20 GiB free")],
    "DM014": [(healthy(port_is_free=False), {}, ERROR, "port 8000 is in use")],
    "DM015": [(healthy(environment={"CUDA_LAUNCH_BLOCKING": "1"}), {}, WARNING, "CUDA_LAUNCH_BLOCKING=1")],
}  # fmt: skip


def test_every_rule_about_the_machine_has_a_case():
    assert CASES.keys() == MACHINE_RULES.keys()


@pytest.mark.parametrize(("rule", "machine", "changes", "severity", "says"), [
    (rule, *case) for rule, cases in CASES.items() for case in cases
])  # fmt: skip
def test_what_is_missing_is_named_with_how_to_get_it(rule, machine, changes, severity, says):
    found = [finding for finding in doctor(machine, deployment(**changes)) if finding.rule == rule]
    assert [finding.severity for finding in found] == [severity]
    assert says in found[0].what and found[0].fix and found[0].why and found[0].source


def test_a_single_gpu_needs_neither_links_nor_mpi_nor_much_shared_memory():
    machine = healthy(
        gpus=healthy().gpus[:1], links={0: (0, 18)}, paths={}, fabric={}, shared_memory=64 << 20, mpi=None
    )
    assert doctor(machine, deployment({"tensor_parallel_size": 1}, gpus="B300")) == []


def test_a_local_checkpoint_needs_no_room_to_download():
    assert doctor(healthy(free=GIB), deployment(target_source={"path": Path("/models/gpt-oss-120b")})) == []


def test_this_machine_can_be_looked_at():
    machine = look_around({"HF_HOME": "/nowhere/at/all"})
    assert machine.gpus or machine.trouble

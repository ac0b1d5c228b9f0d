"""Four ranks and what they say to each other. Rank 0 prints one line for each claim that held on all ranks.

Argument: how they end. "parted": elsewhere in the midst of work, after all claims; "odd": without any, of two minds
about the last step.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflash_trt.errors import Failure, UserError
from dflash_trt.graph.collective import all_gather, all_reduce
from dflash_trt.graph.net import Net
from dflash_trt.runtime import Generator, Limits, Request, Session, StepInputs, StepOutputs, collective_op
from dflash_trt.runtime.lockstep import follow, lead
from dflash_trt.runtime.world import World, find_world
from tests.runtime.toy import ToySession, continuation

FLOAT = ir.DataType.FLOAT


def sums_and_rows(world: World) -> None:
    everybody = range(world.size)
    parts = [np.random.default_rng(rank).standard_normal((3, 5)).astype(np.float32) * 10.0**rank for rank in everybody]
    in_order = parts[0]
    for part in parts[1:]:
        in_order = in_order + part
    for group, expected in ((everybody, in_order), ((0, 1), parts[0] + parts[1]), ((2, 3), parts[2] + parts[3])):
        if world.rank in group:
            assert world.all_reduce(parts[world.rank], group).tobytes() == expected.tobytes()
    rows = [np.full((rank, 2), rank, np.float32) for rank in everybody]  # rank 0 has none
    assert np.array_equal(world.all_gather(rows[world.rank], everybody), np.concatenate(rows))
    large = np.full((700, 700), world.rank, np.float32)
    assert (world.all_reduce(large, everybody) == sum(everybody)).all()


def values(world: World) -> None:
    assert world.share("ranks", world.rank) == list(range(world.size))
    assert world.broadcast("text", f"from {world.rank}") == "from 0"
    assert world.collect("ranks", world.rank) == (None if world.rank else list(range(world.size)))
    assert (world.local_rank, world.local_size, world.hosts) == (world.rank, world.size, 1)


def errors_in_common(world: World) -> None:
    def fail_on(*ranks: int) -> None:
        if world.rank in ranks:
            raise UserError("no such file", where=f"file {world.rank}")

    assert world.together("work", lambda: "done") == "done"
    for ranks, message in (((0, 1), "no such file — file 0"), ((2, 3), "rank 2: no such file — file 2")):
        assert said_by(lambda ranks=ranks: world.together("work", lambda: fail_on(*ranks))) == message
    world.agree({"version": 1, "directory": "same"})
    said = said_by(lambda: world.agree({"version": 1, "directory": "same" if world.rank != 2 else "other"}))
    assert said.startswith("directory: other on rank 2, same on rank 0 — ")


def said_by(work) -> str:
    try:
        work()
    except UserError as error:
        assert error.everywhere
        return str(error)
    raise AssertionError("nothing was raised")


def graph(world: World, group: tuple[int, ...]) -> ort.InferenceSession:
    net = Net("float32", native=False)
    x = net.input("x", FLOAT, ("rows", 3))
    net.output("sum", all_reduce(net, x, group), FLOAT, ("rows", 3))
    rows = net.reshape(all_gather(net, net.mul(x, x), group), [len(group), -1, 3])  # no other number of them will do
    net.output("rows", rows, FLOAT, (len(group), "rows", 3))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    collective_op.register(options, world)
    with tempfile.TemporaryDirectory() as folder:
        ir.save(net.model("collectives"), Path(folder) / "graph.onnx")
        return ort.InferenceSession(Path(folder) / "graph.onnx", options)


def a_graph(world: World) -> None:
    group = (0, 1) if world.rank < 2 else (2, 3)
    session = graph(world, group)
    for rows in (2, 0, 300):
        total, gathered = session.run(None, {"x": np.full((rows, 3), world.rank, np.float32)})
        assert total.shape == (rows, 3) and (total == sum(group)).all()
        assert gathered.shape == (2, rows, 3)
        assert (gathered == np.square(group)[:, None, None]).all()


def an_error_inside_a_graph(world: World) -> None:
    session = graph(world, (0, 1, 2, 3))
    post, world._mail = world._mail, None
    try:
        with collective_op.faults():
            session.run(None, {"x": np.zeros((1, 3), np.float32)})
    except Failure as error:  # and not what ONNX Runtime says of the rows that did not come
        assert "start it with mpirun" in str(error)
    else:
        raise AssertionError("nothing was raised")
    world._mail = post
    with collective_op.faults():
        session.run(None, {"x": np.zeros((1, 3), np.float32)})


class Stubborn(ToySession):
    """Decides something else in one step, counted from 1."""

    def __init__(self, limits: Limits, number: int):
        super().__init__(limits)
        self.number = number

    def step(self, inputs: StepInputs) -> StepOutputs:
        outputs = super().step(inputs)
        return replace(outputs, next_token=outputs.next_token + 1) if len(self.calls) == self.number else outputs


def lockstep(world: World) -> None:
    limits = Limits(2, 64, 4, 8)
    toy = ToySession(limits)
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8]]
    if world.rank:
        follow(toy, world)
    else:
        with lead(toy, world) as session:
            generator = Generator(session)
            ids = [generator.add(Request(prompt, 10 + 9 * n)) for n, prompt in enumerate(prompts)]
            got: dict[str, list[int]] = {request: [] for request in ids}
            for number in range(1000):
                if not generator.busy:
                    break
                for out in generator.step():
                    got[out.request_id] += out.token_ids
                if number == 4:
                    generator.cancel(ids[1])
            for n, (request, prompt) in enumerate(zip(ids, prompts, strict=True)):
                expected = continuation(prompt, 10 + 9 * n)
                assert got[request] == expected if n != 1 else got[request] == expected[: len(got[request])]
    assert len(set(world.share("calls", len(toy.calls)))) == 1

    refused: list[Session] = [ToySession(limits)]
    try:  # a request that the engine cannot serve
        drive(world, refused[0], Request([1], 1000))
    except UserError as error:
        assert error.everywhere and "max_seq_len 64" in str(error)
    else:
        raise AssertionError("nothing was raised")

    for odd in (2, 0):
        try:
            drive(world, Stubborn(limits, 3) if world.rank == odd else ToySession(limits), Request([1, 2], 40))
        except Failure as error:
            assert error.everywhere and f"rank {odd} decided otherwise" in str(error), error
        else:
            raise AssertionError("nothing was raised")


def drive(world: World, session: Session, request: Request) -> None:
    if world.rank:
        follow(session, world)
        return
    with lead(session, world) as leading:
        list(Generator(leading).generate([request]))


CLAIMS = (sums_and_rows, values, errors_in_common, a_graph, an_error_inside_a_graph, lockstep)


def end_parted(world: World) -> None:
    for claim in CLAIMS:
        claim(world)
        world.share("claim", None)
        if world.rank == 0:
            print(claim.__name__, flush=True)
    x = np.zeros((2, 3), np.float32)
    if world.rank == 3:
        world.all_gather(x, range(4))
    else:
        world.all_reduce(x, range(4))


def end_odd(world: World) -> None:
    limits = Limits(2, 64, 4, 8)
    if world.rank:
        follow(Stubborn(limits, 1) if world.rank == 2 else ToySession(limits), world)
        return
    with lead(ToySession(limits), world) as session:
        generator = Generator(session)
        generator.add(Request([1, 2], 40))
        generator.step()  # and no other: a request that ends has its slot freed, which would compare


with find_world() as found:
    {"parted": end_parted, "odd": end_odd}[sys.argv[1]](found)

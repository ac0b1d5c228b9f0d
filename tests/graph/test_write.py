"""What a graph looks like on disk."""

from __future__ import annotations

import onnx
import pytest

from dflash_trt.checkpoint import pair, read_draft, read_target
from dflash_trt.graph import write_graphs
from tests.tiny import make_pair


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("write")
    target, draft = make_pair(root)
    directory = root / "engine"
    directory.mkdir()
    checked = pair(read_target(target), read_draft(draft))
    return checked, directory, write_graphs(checked, directory, dtype="bfloat16", cache_len=256)


def test_no_weight_is_copied_and_every_one_is_referenced_where_it_lies(written):
    checked, directory, paths = written
    refs = {f"target.{name}": ref for name, ref in checked.target.tensors.items()}
    refs |= {f"draft.{ref.name}": ref for ref in checked.draft.tensors.values()}
    for path in paths:
        model = onnx.load(path, load_external_data=False)
        external = {i.name: i for i in model.graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL}
        expected = refs if "-ar" not in path.name else {k: v for k, v in refs.items() if k.startswith("target.")}
        assert set(external) == set(expected)
        for name, tensor in external.items():
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert (directory / where["location"]).resolve() == expected[name].file.resolve()
            assert (int(where["offset"]), int(where["length"])) == (expected[name].offset, expected[name].nbytes)
        assert path.stat().st_size < 200_000
        inline = sum(len(i.raw_data) for i in model.graph.initializer if i.name not in external)
        assert inline < 4096


def test_the_graphs_are_valid_onnx_at_opset_24(written):
    _, _directory, paths = written
    assert [path.name for path in paths] == ["rank0.onnx", "rank0.cpu.onnx", "rank0-ar.onnx", "rank0-ar.cpu.onnx"]
    for path in paths:
        model = onnx.load(path, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
        for tensor in model.graph.initializer:  # the checker wants plain files; links are what ours are
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
                tensor.raw_data = bytes(_size(tensor))
        onnx.checker.check_model(model, full_check=True)


def _size(tensor: onnx.TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize

"""What those who run a graph know its parts by; nothing here needs onnx-ir, which takes a second to import."""


def graph_file(rank: int, *, draft: bool, cpu: bool) -> str:
    """Of a rank's graphs: with the drafter or autoregressive; for a CPU or as TensorRT compiles it."""
    return f"rank{rank}{'' if draft else '-ar'}{'.cpu' if cpu else ''}.onnx"


def weights_file(rank: int) -> str:
    """Of what had to be written for a rank."""
    return f"rank{rank}.safetensors"


LINKS = "weights"  # folder beside a graph that holds one link per checkpoint file
CONTRIB = "ai.onnx.contrib"  # domain of custom ops in ONNX Runtime
REDUCE, GATHER = "DflashAllReduce", "DflashAllGather"  # of a float32 tensor of any shape, over the ranks in `group`

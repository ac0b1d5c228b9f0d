"""What those who run a graph know its parts by; nothing here needs onnx-ir, which takes a second to import."""

LINKS = "weights"  # folder beside a graph that holds one link per checkpoint file
CONTRIB = "ai.onnx.contrib"  # domain of custom ops in ONNX Runtime
REDUCE, GATHER = "DflashAllReduce", "DflashAllGather"  # of a float32 tensor of any shape, over the ranks in `group`

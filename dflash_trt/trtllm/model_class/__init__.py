"""Networks that `trtllm-build --model_cls_file` loads: `export` copies these files, nothing here imports them.

They are written against TensorRT-LLM 1.2.1 and were never executed.
"""

"""TensorRT-LLM 1.2.1 as an engine core of its own.

It batches by itself, request by request, where the other engines compute steps that our loop
puts together. So what it shares with them is what front and core say to each other
(worker.messages): this package is the other end of that, for it.

Where a comment cites TensorRT-LLM, the behaviour is that of 1.2.1; #N is an issue or pull
request of NVIDIA/TensorRT-LLM.
"""

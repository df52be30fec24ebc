"""Weights rounded to few bits, in the compressed-tensors format that vLLM and transformers read.

Each module imports only the modules above it in this list:

    scheme      bits and group of a weight, and its size
    rounding    round to nearest, pack and unpack
    modules     which weights are rounded, and which of them need the same scheme
    recipe      the scheme of every module, and its ``quantization_config``
    encoding    tensors of a file, block by block
    measure     predicted errors of each scheme, from a checkpoint
    inputs      statistics of the inputs of modules, recorded while a model runs

``scheme``, ``rounding``, ``modules`` and ``recipe`` are pure.
"""

"""Layers that compute in another dtype than the job, on some ranks (QSync, arXiv 2407.02327).

Each module imports only the modules below it in this list:

    apply     a policy and the layers of a rank
    regions   hooks on modules, with which they compute in a dtype
    policy    which layers of which ranks compute in which dtype, as a value and as a file

``policy`` is pure. ``regions`` and ``apply`` import torch. ``unickpt plan precision`` makes the file. The adapters apply it.
"""

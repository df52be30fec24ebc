"""What ``unickpt doctor`` and ``unickpt hooks status`` look at. Neither imports a framework.

Each module imports only the modules above it in this list:

    bounded       commands that may hang, with a time limit
    masking       text without what may be a credential
    declared      the hooks that the adapters declare, from a file
    frameworks    which hooks act in the installed frameworks, from their source files
    installation  the entry point that PyTorch calls, and the extensions
    machine       versions, memory, clock, variables of the environment
    torch_probe   what torch says: runs in a process of its own
    path_probe    a folder or URL, where a checkpoint would be written: likewise
    facts         all of this, read
    answers       what the facts mean: the answers, and what to do
    text          facts and answers as text and as JSON

``masking``, ``answers`` and ``text`` are pure.
"""

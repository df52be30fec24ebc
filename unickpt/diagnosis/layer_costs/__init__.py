"""Times of layers: measured ones, their prediction at another size or on another device, and those of earlier jobs.

Each module imports only the modules above it in this list:

    measured   one measured layer, and the JSON that holds it
    compute    time of a layer at another size or on another device
    store      measured layers of earlier jobs, in a file

All modules but ``store`` are pure. ``planning.plan`` makes plans of them, and the agent of a host compares its ranks with them.
"""

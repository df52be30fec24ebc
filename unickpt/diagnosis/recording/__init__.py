"""Recording of collectives into a ring that outlives the process and can be read while the process hangs."""

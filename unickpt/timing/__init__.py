"""Timing of collectives: what every rank did, when, in a ring that outlives the process and can be read while it hangs.

records     what is noted of a call
ring        a fixed number of them in shared memory
recorder    one rank's notes
collectives hooks on torch.distributed, the only module that knows its private parts
moments     steps, phases, garbage collection and waits for data
"""

"""Recording of collectives into a ring that outlives the process and can be read while the process hangs.

records              layout of one record
ring                 fixed number of records in shared memory
ring_folder          folder with the rings of a host's ranks
recorder             writer of one rank's records
process_group_hooks  hooks on torch.distributed
native_ops           hooks on operators that torch calls in C++
device_events        events: instants that are read after they have passed
device_clock         their host time
device_timer         begin and end of calls on a device, by events
flight_recorder      progress on a device, from torch's flight recorder
phases               steps, phases, garbage collections and waits for data
rank_ranges          members of process groups as ranges
"""

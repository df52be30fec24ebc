"""From records to a verdict: which rank, which link, since when, and how that is known.

Functions of their arguments; nothing here reads a file, asks a process or knows the time.

    summaries   what of a rank's ring the others need to know
    waiting     calls that ranks wait in, and for whom
    mismatches  ranks that are in the same call with something else
    hangs       whoever is waited for and waits for nobody
    steps       how long ranks' steps took, and what of it was their own time
    stragglers  who keeps the others waiting
    links       links that carry less than others, by point-to-point calls
    transfers   point-to-point calls whose both sides are known
    transport   links that carry less than they did, by the kernel's counters of their connections
    presumed    who waits in calls that end on a device
    view        what a host knows of its ranks, and a job when these are put together
    wire        a view as bytes
    clocks      what the clocks of hosts differ by
    deadlines   how long a call may take
    middles     medians of many things at once
    examining   all of that on the rings of a job, and lines for a person
    verdicts    what is told
"""

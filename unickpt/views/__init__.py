"""What a job's records look like: for a browser, for Perfetto, for Prometheus and TensorBoard.

Functions of jobs as they were read (``unickpt.timing.folder``) and of the verdicts on them; nothing here needs torch.

gathering   the ranks of all hosts on one clock, with their groups
lateness    who came late to a call, and what became of a step's time
transfers   how long point-to-point calls took, by pair of ranks
waiting     who waits for whom now
timeline    what the ranks did in the last steps, one line each
trace       every record, as a Chrome trace
report      all of it on one HTML page
metrics     measurements for Prometheus and TensorBoard
"""

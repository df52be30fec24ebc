"""Reports on a job: text, HTML, Perfetto trace, Prometheus and TensorBoard. No module here needs torch.

verdict_line     machine-readable line of a verdict, and its parser
verdict_text     verdicts as text
job_records      records of all hosts on one clock, with their groups
arrivals         lateness of ranks at collectives, and the parts of a step's time
transfer_delays  durations of point-to-point calls by pair of ranks
wait_table       current waits
timeline         activity of the ranks in the last steps
perfetto         all records as a Chrome trace
html_report      report on one HTML page
metrics          metrics for Prometheus and TensorBoard
"""

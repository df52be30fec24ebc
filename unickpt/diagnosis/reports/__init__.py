"""Reports on a job: text, HTML, Perfetto trace, Prometheus and TensorBoard. No module here needs torch."""

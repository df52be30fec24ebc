"""What a change of the job would gain: replay of its records, and plans."""

"""What an agent does on its own host: workers, diagnosis, measures."""

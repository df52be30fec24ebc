"""Messages between agents: their text, addresses, and what a message waits for."""

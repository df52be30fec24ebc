"""An agent among the other agents: who leads, what it answers, its copy of the state."""

"""What a person reads: plans as text, JSON and differences; the state of the machine."""

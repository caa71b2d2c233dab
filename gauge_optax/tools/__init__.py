"""What a user does before training: a plan of a run, gauges of LoRA factors, gauges as JSON."""

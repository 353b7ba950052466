"""Long tests with faults at random: `make soak` (docs/reliability.md)."""

"""How one training step is divided over processes: one technique a file, none of which knows the others."""

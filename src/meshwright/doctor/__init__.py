"""Health and speed of a node against expected values, and its kernel settings."""

"""Read the TOML configurations of torchtitan up to 0.2. Imports no torch."""

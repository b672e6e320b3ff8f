"""Code that runs in torchtitan's processes and imports it."""

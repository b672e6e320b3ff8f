"""Files that MaxText's processes are given before they start."""

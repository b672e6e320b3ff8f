"""Files and addresses that MaxText's processes are given before they start."""

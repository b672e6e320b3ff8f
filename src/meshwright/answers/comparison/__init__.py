"""Records, estimates and published figures side by side: sides, ratios, what differs, the split gap."""

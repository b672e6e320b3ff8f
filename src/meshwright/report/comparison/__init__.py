"""Records, estimates and published figures side by side: `meshwright compare`."""

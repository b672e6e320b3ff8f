"""Records, estimates and published figures that one report collects, their prices and measured passes."""
